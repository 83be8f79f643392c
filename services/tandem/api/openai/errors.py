"""Errors in the format of OpenAI's API: {"error": {"message", "type", "param", "code"}}.

If a retry may help, the error also has the field `retry_after_s`: the number of whole seconds that
the header `Retry-After` has.
"""

from typing import Any

from tandem.errors import RateLimited, TandemError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    **dict.fromkeys((400, 405, 408, 413, 415, 431), "invalid_request_error"),
}


def error_body(error: TandemError) -> dict[str, Any]:
    """Builds the JSON body of an error response."""
    body = plain_error(error.http_status, error.message, error.code, error.param)
    if isinstance(error, RateLimited):  # OpenAI's API has special types for rate limits.
        body["error"]["type"] = "tokens" if error.kind == "tokens" else "requests"
    if error.retry_after_s is not None:
        body["error"]["retry_after_s"] = error.retry_after_whole_s
    return body


def plain_error(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """Builds the JSON body for an HTTP error that has no TandemError, such as an unknown path."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
