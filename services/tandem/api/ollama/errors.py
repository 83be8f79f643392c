"""Errors in the format of Ollama's API: {"error": "the message"}. Tandem adds the field `code`."""

import re
from collections.abc import Mapping
from typing import Any

from tandem.errors import TandemError

PREFIX = "/api/"


def is_ollama(scope: Mapping[str, Any]) -> bool:
    """Decides whether the call with this ASGI scope uses Ollama's API."""
    return re.sub("/{2,}", "/", scope["path"]).startswith(PREFIX)


def error_body(error: TandemError) -> dict[str, Any]:
    """Builds the JSON body of an error response, or the last line of a stream that ends early."""
    return plain_error(error.http_status, error.message, error.code)


def plain_error(status: int, message: str, code: str) -> dict[str, Any]:
    """Builds the JSON body for an HTTP error that has no TandemError, such as an unknown path."""
    return {"error": message, "code": code}
