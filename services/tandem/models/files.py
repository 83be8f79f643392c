"""Reads JSON files of a model, and turns errors of its files into one line that names the file.

A file that came with a model may hold anything. Whoever reads it expects values of some types, and
Python or a library raises whatever it raises for others.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.common.printable import printable
from tandem.errors import ConfigError, TandemError

_LINE_MAX = 500  # characters of a message, which may quote the file
_NAMES_SHOWN_MAX = 3


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turns each error inside into a ConfigError that names `file`.

    A TandemError keeps its class and gets the name, unless its message has it.
    """
    try:
        yield
    except TandemError as error:
        said = _shown(error.message)
        named = said if str(file) in error.message else f"{file}: {said}"
        raise type(error)(named) from error
    except BaseException as error:
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        raise ConfigError(f"{file} cannot be read: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Returns the type of the error and the first line of what it says."""
    lines = str(error).splitlines() or [""]
    return _shown(f"{type(error).__name__}: {lines[0]}").removesuffix(": ")


def few(tensors: Sequence[str]) -> str:
    """Returns the first of some tensors' names, and how many more there are."""
    more = len(tensors) - _NAMES_SHOWN_MAX
    shown = ", ".join(tensors[:_NAMES_SHOWN_MAX])
    return f"{shown} and {more} more tensors" if more > 0 else shown


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ConfigError naming the file if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Returns what `read_json` does; an empty object if there is no such file."""
    return read_json(path) if path.is_file() else {}


def _shown(text: str) -> str:
    """Returns the text with its control characters escaped, cut to a bounded length."""
    cut = text if len(text) <= _LINE_MAX else text[:_LINE_MAX] + "..."
    return printable(cut)


def _is_panic(error: BaseException) -> bool:
    """Returns whether a library in Rust panicked: such an error is no Exception, and its class can
    be imported from nowhere."""
    return type(error).__name__ == "PanicException"
