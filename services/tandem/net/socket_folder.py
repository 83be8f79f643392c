"""Folders for Unix sockets, whose whole path has at most 107 bytes on Linux.

A folder in TMPDIR may be too deep for that. Then a folder in /tmp takes its place.
"""

import os
import tempfile
from pathlib import Path

from tandem.errors import ConfigError

_PATH_BYTES_MAX = 107  # `sun_path` has 108 with the zero at its end
_BELOW_BYTES_MAX = 32  # of what stands below such a folder, as /ray-abcdefgh/plasma_store
_SHORT = Path("/tmp")


def is_short(folder: Path) -> bool:
    """Returns whether sockets below this folder have paths that are short enough."""
    return len(os.fsencode(folder)) + _BELOW_BYTES_MAX <= _PATH_BYTES_MAX


def make_socket_folder() -> Path:
    """Makes a folder of this user alone. Raises ConfigError if neither TMPDIR nor /tmp will do."""
    place = Path(tempfile.gettempdir())
    if is_short(place):
        return Path(tempfile.mkdtemp(prefix="tandem-"))
    try:
        return Path(tempfile.mkdtemp(prefix="tandem-", dir=_SHORT))
    except OSError as error:
        most = _PATH_BYTES_MAX - _BELOW_BYTES_MAX
        raise ConfigError(
            f"TMPDIR is {place}, and sockets need one of at most {most} bytes; {_SHORT} cannot be "
            f"used instead: {error.strerror}"
        ) from None
