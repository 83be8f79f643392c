"""Errors as Anthropic's clients know them: {"type": "error", "error": {"type", "message"}}.

Statuses are those of the other APIs, but for 529: there the router has no room now, and a retry
may help. 429 is for limits of the API key. `code` is Tandem's own, as in the other APIs.
https://platform.claude.com/docs/en/api/errors
"""

from typing import Any

from tandem.errors import QueueFull, TandemError

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


def is_anthropic(path: str) -> bool:
    """Returns whether a path belongs to this API."""
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(error: TandemError) -> int:
    """Returns the status of an answer with this error."""
    return OVERLOADED if isinstance(error, QueueFull) else error.http_status


def error_body(error: TandemError) -> dict[str, Any]:
    """Returns the body of an answer, or the data of the event, with this error."""
    return plain_error(status_of(error), error.message, error.code)


def plain_error(status: int, message: str, code: str) -> dict[str, Any]:
    """Returns the body of an error that HTTP itself knows."""
    kind = _TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
