"""Creates folders for Unix sockets. On Linux, the full path of a socket may have at most 107 bytes.

If TMPDIR has too long a path, a folder in /tmp is used instead.
"""

import os
import tempfile
from pathlib import Path

from tandem.errors import ConfigError

_PATH_BYTES_MAX = 107  # `sun_path` has 108 bytes including the final zero
# Number of bytes reserved for the path of a socket within the folder, such as
# /ray-abcdefgh/plasma_store.
_BELOW_BYTES_MAX = 32
_SHORT = Path("/tmp")


def is_short(folder: Path) -> bool:
    """Returns True if the paths of sockets in this folder are short enough."""
    return len(os.fsencode(folder)) + _BELOW_BYTES_MAX <= _PATH_BYTES_MAX


def make_socket_folder() -> Path:
    """Creates a folder that other users cannot read. Raises ConfigError if neither TMPDIR nor /tmp
    can be used."""
    place = Path(tempfile.gettempdir())
    if is_short(place):
        return Path(tempfile.mkdtemp(prefix="tandem-"))
    try:
        return Path(tempfile.mkdtemp(prefix="tandem-", dir=_SHORT))
    except OSError as error:
        most = _PATH_BYTES_MAX - _BELOW_BYTES_MAX
        raise ConfigError(
            f"TMPDIR is {place}, a path that is too long for Unix sockets, and {_SHORT} cannot be "
            f"used instead ({error.strerror}); set TMPDIR to a folder whose path has at most "
            f"{most} bytes"
        ) from None
