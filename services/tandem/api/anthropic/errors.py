"""Errors in the format of Anthropic's API: {"type": "error", "error": {"type", "message", "code"}}.
Tandem adds the field `code`.

HTTP statuses are those of the router's other APIs, with one exception: if the router's queue is
full, the status is 529, after which a client may retry. 429 always means that the client has
reached a limit of its API key.

A client can ask to continue a thread (a conversation that the server keeps). Tandem keeps no
threads, so it answers with `details.error_code`, by which the client recognizes this error and
sends the whole conversation.

https://platform.claude.com/docs/en/api/errors
"""

import re
from collections.abc import Mapping
from typing import Any

from tandem.errors import ContextTooLong, QueueFull, TandemError, ThreadNotFound

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
    **dict.fromkeys((400, 405, 408, 409, 415, 431), "invalid_request_error"),
}
PATH = "/v1/messages"
MODELS_PATH = "/v1/models"


def is_anthropic(scope: Mapping[str, Any]) -> bool:
    """Decides whether the call with this ASGI scope uses Anthropic's API. Both Anthropic's and
    OpenAI's API have /v1/models; only Anthropic's clients send the header `anthropic-version`."""
    # A client that sends a slash or /v1 too much gets an error, which has its API's form, too.
    path = re.sub("/{2,}", "/", scope["path"]).replace("/v1/v1/", "/v1/", 1)
    if _is_within(path, MODELS_PATH):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return _is_within(path, PATH)


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def status_of(error: TandemError) -> int:
    """Maps an error to its HTTP status in Anthropic's API."""
    return OVERLOADED if isinstance(error, QueueFull) else error.http_status


def error_body(error: TandemError) -> dict[str, Any]:
    """Builds the JSON body of an error response, or the data of an error event in a stream."""
    message = error.message
    if isinstance(error, ContextTooLong):
        # Clients search for these first words, and then shorten the conversation.
        message = f"prompt is too long: {message}"
    body = plain_error(status_of(error), message, error.code)
    if isinstance(error, ThreadNotFound):
        body["error"]["details"] = {"error_code": error.code}
    return body


def plain_error(status: int, message: str, code: str) -> dict[str, Any]:
    """Builds the JSON body for an HTTP error that has no TandemError, such as an unknown path."""
    kind = _TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
