"""Parses the body of an HTTP request for the endpoint picker, in the same way as the router's HTTP
routes do."""

from collections.abc import Callable, Mapping
from typing import Any

from tandem.api.anthropic.errors import PATH as MESSAGES_PATH
from tandem.api.anthropic.requests import MessagesBody, parse_messages
from tandem.api.http.body import parse_object
from tandem.api.ollama.requests import TAG
from tandem.api.openai.embeddings import EmbeddingsBody
from tandem.api.openai.requests import (
    ChatBody,
    CompletionBody,
    drop_unknown_fields,
    parse_chat,
    parse_completion,
    validate,
)
from tandem.api.openai.structured import Strict
from tandem.api.responses.requests import ResponsesBody, parse_response
from tandem.router.request.request import ClientRequest

_Read = Callable[[dict[str, Any], str], ClientRequest]


def read_request(path: str, body: bytes, request_id: str) -> ClientRequest | None:
    """Parses the body as the route at `path` does. If the body has several prompts, the result is
    the request for the first prompt. Returns None if the route takes no prompt. Raises
    BadRequest."""
    read = _READ.get(path.partition("?")[0])
    return read(parse_object(body), request_id) if read is not None else None


def named_model(path: str, body: bytes) -> str:
    """Returns the model that a body names, whatever its route; "" if the body names none. Raises
    BadRequest."""
    name = parse_object(body).get("model")
    if not isinstance(name, str):
        return ""
    return name.removesuffix(TAG) if path.startswith("/api/") else name


def _chat(body: dict[str, Any], request_id: str) -> ClientRequest:
    return parse_chat(_known(ChatBody, body), request_id).requests[0]


def _completion(body: dict[str, Any], request_id: str) -> ClientRequest:
    return parse_completion(_known(CompletionBody, body), request_id).requests[0]


def _either(body: dict[str, Any], request_id: str) -> ClientRequest:
    return (_chat if "messages" in body else _completion)(body, request_id)


def _messages(body: dict[str, Any], request_id: str) -> ClientRequest:
    return parse_messages(_known(MessagesBody, body), request_id).requests[0]


def _response(body: dict[str, Any], request_id: str) -> ClientRequest:
    parsed = validate(ResponsesBody, _known(ResponsesBody, body))
    return parse_response(parsed, (), request_id).chat.requests[0]


def _embedding(body: dict[str, Any], request_id: str) -> ClientRequest:
    parsed = validate(EmbeddingsBody, _known(EmbeddingsBody, body))
    return parsed.to_requests(request_id)[0]


def _known(kind: type[Strict], body: dict[str, Any]) -> dict[str, Any]:
    drop_unknown_fields(kind, body)
    kind.leave_out(body)
    return body


_READ: Mapping[str, _Read] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embedding,
    "/v1/responses": _response,
    MESSAGES_PATH: _messages,
    "/invocations": _either,
}
