"""Text files that clients send as a part of a message. A file becomes plain text of the prompt,
because models read text and not files. Other files, such as PDFs, are refused."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/x-yaml")


def text_of_file(file: Mapping[str, Any]) -> str:
    """Returns the name and the text of a file of OpenAI's APIs: `file_data` is a data URL with
    base64, or base64 alone. Raises PydanticCustomError if the file is not sent itself, or if it is
    not text in UTF-8."""
    data = file.get("file_data")
    if not isinstance(data, str):
        raise _wrong("a file must be sent in file_data, because this server keeps no files")
    head, comma, encoded = data.partition(",")
    media_type = head.removeprefix("data:").partition(";")[0] if comma else ""
    text = decode_text(encoded if comma else data, media_type)
    name = file.get("filename")
    return f"{name}\n{text}" if isinstance(name, str) and name else text


def is_text(part: Any) -> bool:
    """Returns whether a part of a message, in any API, is a file that becomes text."""
    try:
        match part:
            case {"type": "document", "source": {"type": "base64", **source}}:
                decode_text(str(source.get("data")), str(source.get("media_type")))
            case {"type": "document", "source": {"type": "text" | "content"}}:
                pass
            case {"type": "file", "file": dict(file)}:
                text_of_file(file)
            case {"type": "input_file"}:
                text_of_file(part)
            case _:
                return False
    except PydanticCustomError:
        return False
    return True


def decode_text(encoded: str, media_type: str) -> str:
    """Returns the text of a file. `encoded` is base64; `media_type` is "" if it is unknown. Raises
    PydanticCustomError if the file is not text in UTF-8."""
    is_text = media_type.startswith("text/") or media_type in ("", *_TEXT_TYPES)
    try:
        text = base64.b64decode(encoded, validate=True).decode() if is_text else None
    except (binascii.Error, UnicodeDecodeError):
        text = None
    if text is None or "\0" in text:
        shown = media_type[:40] or "unknown"
        raise _wrong(
            f"only files of text in UTF-8 are supported; the type of this one is {shown!r}"
        )
    return text


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{message}", {"message": message})
