"""Logs of the runs of `tandem up` on this machine. They are kept after a run has ended.

  $XDG_STATE_HOME/tandem/runs/START-CLUSTER/ID.log    START is the time in UTC, sortable by name
  .../START-CLUSTER/addresses.json                    URLs of the cluster, while it runs

A running cluster holds a lock on its folder. Each new run deletes all folders but the newest
`RUNS_KEPT`, but never that of a running cluster. A large log is renamed to ID.log.1, and a new file
is started.
"""

import fcntl
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO

import msgspec

from tandem.common.printable import printable
from tandem.errors import OperateError
from tandem.net.observability.log_file import older

log = logging.getLogger(__name__)

RUNS_KEPT = 5
DEFAULT_ADMIN_URL = "http://127.0.0.1:8002"  # admin address of `tandem up` without options
_ADDRESSES_FILE = "addresses.json"
_POLL_S = 0.2
_STATE = ".local/state"


def state_folder() -> Path:
    """Returns the folder for what outlives a run (XDG Base Directory Specification)."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / _STATE) / "tandem"


def runs_folder() -> Path:
    """Returns the folder of all runs."""
    return state_folder() / "runs"


class Addresses(msgspec.Struct, frozen=True):
    """URLs of a cluster of `tandem up`: the public API, and the operators' port."""

    http: str
    admin: str
    pid: int = 0  # process of `tandem up`
    started_at: float = 0.0  # seconds since the epoch


class RunLogs:
    """The logs of one run. RUN_FOLDER/logs is a symbolic link to `folder`. Later runs do not delete
    the logs before `close`."""

    def __init__(self, run_folder: Path, cluster_id: str) -> None:
        """Creates the folder. If that fails, the logs are written to the run folder, which is
        deleted with the run."""
        self.folder = run_folder / "logs"
        self._lock: int | None = None
        kept = runs_folder() / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{cluster_id}"
        try:
            kept.mkdir(parents=True, mode=0o700)
            self._lock = _locked(kept)
            self.folder.symlink_to(kept)
        except OSError as error:
            log.warning(
                "the folder %s cannot be written (%s), so the logs of this run are deleted at the "
                "end of the run. To keep logs, set the environment variable XDG_STATE_HOME to "
                "another folder",
                kept.parent,
                error.strerror,
            )
            return
        self.folder = kept
        _drop_old(kept.parent)

    def announce(self, addresses: Addresses) -> None:
        """Writes the cluster's URLs to the folder. `running` reads them for other commands."""
        with suppress(OSError):
            (self.folder / _ADDRESSES_FILE).write_bytes(msgspec.json.encode(addresses))

    def close(self) -> None:
        """Ends the run. Later runs may then delete its logs."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def running() -> list[Addresses]:
    """Returns the addresses of the clusters that this user runs on this machine, the oldest
    first."""
    # A run that is still starting has no addresses. Its folder is not touched, because trying the
    # lock could prevent the run from taking it.
    runs = ((run, _addresses(run)) for run in reversed(_runs()))
    return [addresses for run, addresses in runs if addresses and _is_active(run)]


def _addresses(run: Path) -> Addresses | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((run / _ADDRESSES_FILE).read_bytes(), type=Addresses)
    return None


def _is_active(run: Path) -> bool:
    try:
        os.close(_locked(run))
    except OSError:
        return True
    return False


def find_address(kind: Literal["http", "admin"], default: str) -> str:
    """Returns the public or the admin address of the cluster that runs on this machine, or else
    `default`. Raises OperateError if several clusters run."""
    found = [getattr(each, kind) for each in running()]
    if len(found) > 1:
        urls = " or ".join(found)
        raise OperateError(
            f"{len(found)} clusters run on this machine; choose one with --url {urls}"
        )
    return found[0] if found else default


def find_run(*, cluster_id: str = "", admin_url: str = "") -> Path | None:
    """Finds the newest run on this machine; None if there is none. If `cluster_id` is given, only
    runs of this cluster count. Otherwise, if `admin_url` is given, only runs with this admin
    address count."""
    for run in _runs():
        addresses = _addresses(run)
        if cluster_id:
            is_meant = run.name.partition("-")[2] == cluster_id
        else:
            is_meant = not admin_url or (addresses is not None and addresses.admin == admin_url)
        if is_meant:
            return run
    return None


def log_names(run: Path | None) -> list[str]:
    """Returns the names of the processes that have a log in the folder of a run."""
    return sorted(file.stem for file in run.glob("*.log")) if run is not None else []


def find_log(run: Path | None, process_id: str) -> Path | None:
    """Finds the log of a worker or router in the folder of a run."""
    path = run / f"{Path(process_id).name}.log" if run is not None else None
    return path if path is not None and path.is_file() else None


def lines(path: Path, is_over: Callable[[], bool]) -> Iterator[str]:
    """Yields the text of a log, then each text that is appended to it. At the end of the log, calls
    `is_over` and ends if the result is True."""
    if older(path).is_file():
        yield older(path).read_text(errors="replace")
    while True:
        with path.open(errors="replace") as stream:
            while _is_named(stream, path):
                if text := stream.read():
                    yield text
                elif is_over():
                    return
                else:
                    time.sleep(_POLL_S)
            if text := stream.read():  # text from before the file was renamed
                yield text


def _is_named(stream: TextIO, path: Path) -> bool:
    """Returns whether the open file still has this name. It has another name after a rotation."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return True  # The file is between the two steps of a rotation.


def show_log(path: Path, *, follow: bool) -> None:
    """Prints a log. With `follow`, waits for further text and prints it until an interrupt."""
    with suppress(KeyboardInterrupt, BrokenPipeError):
        for text in lines(path, lambda: not follow):
            sys.stdout.write(printable(text, keep="\n\t"))
            sys.stdout.flush()


def _folders(runs: Path) -> list[Path]:
    return [run for run in runs.iterdir() if run.is_dir()] if runs.is_dir() else []


def _runs() -> list[Path]:
    """Returns the folders of all runs, the newest first."""
    return sorted(_folders(runs_folder()), reverse=True)


def _drop_old(runs: Path) -> None:
    for run in sorted(_folders(runs))[:-RUNS_KEPT]:
        with suppress(OSError):
            lock = _locked(run)  # fails while the run is active
            shutil.rmtree(run)
            os.close(lock)


def _locked(run: Path) -> int:
    """Locks the folder of a run and returns the descriptor. Raises OSError if the run is active."""
    lock = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
