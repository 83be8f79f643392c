"""Logs of the runs of `tandem up` on this machine. They are kept after a run has ended.

  $XDG_STATE_HOME/tandem/runs/START-CLUSTER/ID.log    START is the time in UTC, sortable by name
  .../START-CLUSTER/addresses.json                    where the cluster is reached, while it runs

A running cluster holds a lock on its folder. Each new run deletes all folders but the newest
`RUNS_KEPT`; it spares those of running clusters. A large log is renamed to ID.log.1, and a new file
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
_ADDRESSES_FILE = "addresses.json"
_POLL_S = 0.2
_STATE = ".local/state"


def runs_folder() -> Path:
    """The folder of all runs (XDG Base Directory Specification)."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / _STATE) / "tandem" / "runs"


class Addresses(msgspec.Struct, frozen=True):
    """URLs of a cluster of `tandem up`: the public API, and the operators' port."""

    http: str
    admin: str


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
                "the logs of this run are deleted when it ends, because the folder %s cannot be "
                "written (%s); name another folder in the variable XDG_STATE_HOME",
                kept.parent,
                error.strerror,
            )
            return
        self.folder = kept
        _drop_old(kept.parent)

    def announce(self, addresses: Addresses) -> None:
        """Writes where the cluster is reached, for commands on this machine (`running`)."""
        with suppress(OSError):
            (self.folder / _ADDRESSES_FILE).write_bytes(msgspec.json.encode(addresses))

    def close(self) -> None:
        """Ends the run. Later runs may then delete its logs."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def running() -> list[Addresses]:
    """Returns the addresses of the clusters that this user runs on this machine."""
    found = []
    for run in sorted(_folders(runs_folder())):
        # A run that is still starting has no such file. Its folder is not touched, because trying
        # the lock could prevent the run from taking it.
        with suppress(OSError, msgspec.DecodeError):
            addresses = msgspec.json.decode((run / _ADDRESSES_FILE).read_bytes(), type=Addresses)
            if _is_active(run):
                found.append(addresses)
    return found


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
        raise OperateError(f"{len(found)} clusters run here: name one with --url {urls}")
    return found[0] if found else default


def find_log(process_id: str) -> Path:
    """Finds the log of a worker or router in the newest run that has one. Raises OperateError."""
    runs = sorted((r for r in _folders(runs_folder())), reverse=True)
    for run in runs:
        if (found := run / f"{Path(process_id).name}.log").is_file():
            return found
    names = ", ".join(sorted({f.stem for run in runs[:1] for f in run.glob("*.log")})) or "none"
    raise OperateError(
        f"no log of {process_id[:80]!r} is kept here; the newest run of `tandem up` has: {names}. "
        "On Kubernetes a pod's log is `kubectl logs POD`"
    )


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
