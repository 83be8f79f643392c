"""Errors as Anthropic's clients know them: {"type": "error", "error": {"type", "message"}}.

Statuses are those of the other APIs, but for 529: there the router has no room now, and a retry
may help. 429 is for limits of the API key. `code` is Tandem's own, as in the other APIs. Clients
recognize the loss of a message thread by `error_code` in `details`.
https://platform.claude.com/docs/en/api/errors
"""

from collections.abc import Mapping
from typing import Any

from tandem.errors import QueueFull, TandemError, ThreadNotFound

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
    """Returns whether a call (its ASGI scope) belongs to this API. OpenAI's has models, too:
    Anthropic's clients name their version in a header."""
    path = scope["path"]
    if _is_within(path, MODELS_PATH):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return _is_within(path, PATH)


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def status_of(error: TandemError) -> int:
    """Returns the status of an answer with this error."""
    return OVERLOADED if isinstance(error, QueueFull) else error.http_status


def error_body(error: TandemError) -> dict[str, Any]:
    """Returns the body of an answer, or the data of the event, with this error."""
    body = plain_error(status_of(error), error.message, error.code)
    if isinstance(error, ThreadNotFound):
        body["error"]["details"] = {"error_code": error.code}
    return body


def plain_error(status: int, message: str, code: str) -> dict[str, Any]:
    """Returns the body of an error that HTTP itself knows."""
    kind = _TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
