import errno
import os
from pathlib import Path

import pytest

from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.files import naming, writing

FILE = Path("/models/tiny/config.json")


class PanicException(BaseException):
    """Stands for that of pyo3, which can be imported from nowhere."""


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (KeyError("x"), f"{FILE} cannot be read: KeyError: 'x'"),
        (ValueError("first\nsecond"), f"{FILE} cannot be read: ValueError: first"),
        (RecursionError(), f"{FILE} cannot be read: RecursionError"),
        (PanicException("out of range"), f"{FILE} cannot be read: PanicException: out of range"),
        (ConfigError("no \x1b[31mred"), f"{FILE}: no \\x1b[31mred"),
        (ConfigError(f"{FILE} is empty"), f"{FILE} is empty"),
        (ConfigError("x" * 10_000), f"{FILE}: {'x' * 500}..."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_message_is_one_line_with_the_files_name(raised, message):
    with pytest.raises(ConfigError) as error, naming(FILE):
        raise raised
    assert error.value.message == message


def test_the_class_of_our_own_errors_stays():
    with pytest.raises(UnsupportedModel), naming(FILE):
        raise UnsupportedModel("an unknown architecture")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_process_is_no_broken_file(raised):
    with pytest.raises(raised), naming(FILE):
        raise raised


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the cache folder /c is on a full disk: free space there, or set OPTION"),
        (errno.EROFS, "the cache folder /c cannot be written .*: set OPTION to a folder"),
    ],
)
def test_a_cache_folder_that_cannot_be_written_is_named_with_a_remedy(
    number: int, words: str
) -> None:
    error = OSError(number, os.strerror(number))
    with pytest.raises(ConfigError, match=words), writing(Path("/c"), "OPTION"):
        raise error
    # `naming` is for reads: a full disk is the fault of the folder that is written.
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(ConfigError, match="the cache folder /c is on a full disk"),
        writing(Path("/c"), "OPTION"),
        naming(Path("/model.gguf")),
    ):
        raise full
