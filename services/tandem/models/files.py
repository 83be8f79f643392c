"""Reads a model's JSON files, and converts errors in a model's files into one-line messages that
name the file.

A model's file may contain anything: a list where the code that reads it expects an object raises a
TypeError, for example. The context manager `naming` converts such errors to a message that names
the file.
"""

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.common.printable import printable
from tandem.errors import ConfigError, TandemError

_LINE_MAX = 500  # maximum length of a message in characters, because messages quote file contents
_NAMES_SHOWN_MAX = 3


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Context manager that converts errors raised in its body into a ConfigError that names `file`.

    A TandemError keeps its class. The file's name is added to the message if the message does not
    contain it.
    """
    try:
        yield
    except TandemError as error:
        said = _printable_line(error.message)
        named = said if str(file) in error.message else f"{file}: {said}"
        raise type(error)(named) from error
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # reads never fail so: another file is written meanwhile, which is at fault
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        raise ConfigError(f"{file} cannot be read: {first_line(error)}") from error


@contextmanager
def writing(folder: Path, option: str) -> Iterator[None]:
    """Context manager that converts errors of writes to a folder into a ConfigError with a remedy.

    `folder` is named in the message, and `option` sets another folder. Other errors pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "is on a full disk"
            todo = f"free space there, or set {option} to a folder on another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            why = f"cannot be written ({error.strerror})"
            todo = f"set {option} to a folder that this user may write"
        else:
            raise
        raise ConfigError(f"the cache folder {folder} {why}: {todo}") from error


def first_line(error: BaseException) -> str:
    """Returns the error's type and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return _printable_line(f"{type(error).__name__}: {lines[0]}").removesuffix(": ")


def few(tensors: Sequence[str]) -> str:
    """Formats tensor names for an error message: the first three names, and "and 5 more tensors"
    for the rest."""
    more = len(tensors) - _NAMES_SHOWN_MAX
    shown = ", ".join(tensors[:_NAMES_SHOWN_MAX])
    return f"{shown} and {more} more tensors" if more > 0 else shown


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON file. Raises ConfigError naming the file if it does not contain an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Parses a JSON file as `read_json` does; returns {} if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def _printable_line(text: str) -> str:
    """Escapes control characters, and cuts the text to `_LINE_MAX` characters."""
    cut = text if len(text) <= _LINE_MAX else text[:_LINE_MAX] + "..."
    return printable(cut)


def _is_panic(error: BaseException) -> bool:
    """Returns whether the error is a panic of a Rust library. The class of such errors does not
    derive from Exception and cannot be imported."""
    return type(error).__name__ == "PanicException"
