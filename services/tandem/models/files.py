"""Reads a model's JSON files, and converts errors in a model's files into one-line messages that
name the file.

The files of a model may have any content. For example, the code that reads a field raises a
TypeError if the file has a list where the code expects an object. The context manager `naming`
converts such errors to a message that names the file.
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
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# errno values that mean that a folder or its disk cannot be written
UNWRITABLE = (*DISK_FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Context manager that converts errors raised in its body into a ConfigError that names `file`.

    A TandemError keeps its class. The file's name is added to the message if the message does not
    contain it. The error of a full disk is raised as it is, because reading a file does not fill a
    disk: it comes from another file that the body writes.
    """
    try:
        yield
    except TandemError as error:
        said = _printable_line(error.message)
        named = said if str(file) in error.message else f"{file}: {said}"
        raise type(error)(named) from error
    except BaseException as error:
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        raise ConfigError(f"{file} cannot be read: {first_line(error)}") from error


@contextmanager
def writing(folder: Path, variable: str) -> Iterator[None]:
    """Context manager that converts an OSError of its body into a ConfigError that says what to do.
    The body writes to the cache folder `folder`. The message says that the user can choose another
    folder with the environment variable `variable`."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise ConfigError(
                f"the disk of the cache folder {folder} is full; free some space, or name a folder "
                f"on another disk in the variable {variable}"
            ) from error
        raise ConfigError(
            f"the cache folder {folder} cannot be written ({error.strerror or error}); name "
            f"another folder in the variable {variable}"
        ) from error


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
        raise ConfigError(f"{path} must contain a JSON object, not a {type(value).__name__}")
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
