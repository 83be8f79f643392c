"""Errors of a model's files, in one line that names the file.

A file that came with a model may hold anything. Whoever reads it expects values of some types, and
Python or a library raises whatever it raises for others.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


def _shown(text: str) -> str:
    """Returns the text with its control characters escaped, cut to a bounded length."""
    cut = text if len(text) <= _LINE_MAX else text[:_LINE_MAX] + "..."
    return printable(cut)


def _is_panic(error: BaseException) -> bool:
    """Returns whether a library in Rust panicked: such an error is no Exception, and its class can
    be imported from nowhere."""
    return type(error).__name__ == "PanicException"
