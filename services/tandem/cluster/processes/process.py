"""Starts a pool's process so that it outlives its keeper (keeper.py), and finds it again later.

The process has a record, the file RUN_FOLDER/processes/ID.json with its pid and start time. The
start time shows whether the pid now belongs to another process. The process is not a child of the
keeper's process (detach.py), so its exit status may be unknown, but a pidfd reports its end without
polling.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.cluster.processes import detach
from tandem.common.backoff import Backoff, doubling
from tandem.common.config.cluster import (
    API_KEY_VARIABLE,
    REDIS_URL_OF_KIND,
    REDIS_URL_VARIABLE,
    ROUTER_POOLS,
    PoolName,
)
from tandem.common.process import endings
from tandem.errors import ConfigError
from tandem.net.observability.log_file import FILE_VARIABLE

_DETACH_DEADLINE_S = 30.0
_LOG_TAIL_LINES = 15
_TAIL_BYTES = 8192
_RESTART_FIRST_S, _RESTART_MAX_S = 0.25, 30.0
# if a process ran for this many seconds, its restarts begin again with the shortest pause
HEALTHY_AFTER_S = 60.0
_LAST_LINE_MAX = 300
# A process logs a warning about its failure within this time before its end.
_AT_FAILURE_S = 10.0
_IS_WARNING = re.compile("WARNING|ERROR|CRITICAL")
# A line that a process of Tandem logged (net/observability/logs.py).
_LOGGED = re.compile(r"[\d-]+ [\d:,]+ (?P<level>[A-Z]+) \S+ (?:\S+: )?(?P<message>.*)")


@dataclass(frozen=True, slots=True)
class DetachedProcess:
    process_id: str  # for example prefill-0
    pid: int
    pidfd: int  # readable once the process has ended; closed by `close`
    log_path: Path

    def wait(self, timeout_s: float | None, wake_fd: int | None = None) -> bool:
        """Waits until the process has ended and returns True. Returns False after `timeout_s`, or
        if `wake_fd` becomes readable."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if wake_fd is not None:
            poll.register(wake_fd, select.POLLIN)
        ready = poll.poll(None if timeout_s is None else round(timeout_s * 1000))
        return any(fd == self.pidfd for fd, _ in ready)

    def send(self, number: signal.Signals) -> None:
        if not self.wait(0):
            signal.pidfd_send_signal(self.pidfd, number)

    def stop(self, deadline_s: float) -> None:
        """Sends SIGTERM, which drains the process, and SIGKILL if it has not ended after
        `deadline_s`."""
        self.send(signal.SIGTERM)
        if not self.wait(deadline_s):
            self.send(signal.SIGKILL)
            self.wait(None)

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped, for example by SIGSTOP."""
        return endings.is_stopped(self.pid)

    def ending(self, oom_kills_before: int | None) -> str:
        """Describes how the process ended, as far as the system reports it (`endings.ending`)."""
        return endings.ending(self.pid, self.pidfd, oom_kills_before)

    def close(self) -> None:
        os.close(self.pidfd)


def start(
    process_id: str, command: Sequence[str], run_folder: Path, environment: Mapping[str, str]
) -> DetachedProcess:
    """Starts a detached process. Raises ConfigError if the command cannot be run."""
    record = _record_path(run_folder, process_id)
    log = log_path(run_folder, process_id)
    for folder in (record.parent, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", detach.__file__, str(record), str(log), *command],
            env={**environment, FILE_VARIABLE: str(log)},
            cwd=run_folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DETACH_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{process_id} did not start in {_DETACH_DEADLINE_S:g} s; check the load of this "
            f"machine and the disk of {run_folder}, then try again"
        ) from None
    if done.returncode:
        raise ConfigError(f"{process_id}: {done.stderr.decode(errors='replace').strip()}")
    process = find(process_id, run_folder)
    if process is None:
        raise ConfigError(f"{process_id} ended as soon as it was started; see {log}")
    return process


def find(process_id: str, run_folder: Path) -> DetachedProcess | None:
    """Finds the running process with this id by its record; None if there is none."""
    try:
        record = json.loads(_record_path(run_folder, process_id).read_text())
    except FileNotFoundError:
        return None
    pid = int(record["pid"])
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    process = DetachedProcess(process_id, pid, pidfd, log_path(run_folder, process_id))
    with suppress(FileNotFoundError):
        # This check must come after `pidfd_open`: from then on, the pidfd cannot refer to another
        # process.
        if detach.start_ticks(pid) == int(record["start_ticks"]) and not process.wait(0):
            return process
    process.close()
    return None


def restart_backoff() -> Backoff:
    """Returns the delays before a process that has ended is started again."""
    return Backoff(doubling(_RESTART_FIRST_S, _RESTART_MAX_S))


def find_all(run_folder: Path) -> list[DetachedProcess]:
    """Finds the running processes of a run folder, in the order of their ids."""
    records = sorted((run_folder / "processes").glob("*.json"))
    found = (find(record.stem, run_folder) for record in records)
    return [process for process in found if process is not None]


def failed_start(what: str, log: Path) -> ConfigError:
    """Builds the error for a process that ended during its start, with the end of its log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    tail = "\n".join(lines[-_LOG_TAIL_LINES:])
    return ConfigError(f"{what} ended during its start; the end of its log:\n{tail}")


def last_warning(log: Path) -> str:
    """Reads what a process logged when it failed: the last line of its log, cut to
    `_LAST_LINE_MAX` characters, without the time and the names before the message.

    Returns "" if the line is older than `_AT_FAILURE_S` seconds, or is no warning or error, because
    the line then does not explain the end. A line without a level, such as the last line of a
    traceback, counts as an error.
    """
    with suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in lines[::-1] if line.strip()), "")
        if not last or time.time() - os.fstat(stream.fileno()).st_mtime > _AT_FAILURE_S:
            return ""
        if last.startswith("{") and not _IS_WARNING.search(last):  # TANDEM_LOG_FORMAT=json
            return ""
        if (logged := _LOGGED.match(last)) is None:
            return last[:_LAST_LINE_MAX]
        if _IS_WARNING.match(logged["level"]):
            return logged["message"][:_LAST_LINE_MAX]
    return ""


def log_path(run_folder: Path, process_id: str) -> Path:
    return run_folder / "logs" / f"{process_id}.log"


def child_environment(
    environment: Mapping[str, str], pool: PoolName | None = None
) -> dict[str, str]:
    """Copies the environment for a process of a pool, without Ray's settings and the operator's API
    key. Ray's settings are meant for the keeper's process only.

    REDIS_URL_VARIABLE is set to the Redis URL for this kind of process, router or worker. The
    variables with the URLs for other kinds are removed. If `pool` is None, all URLs are kept,
    because the process starts processes of several kinds.
    """
    left_out = ("RAY_", "__RAY", API_KEY_VARIABLE)
    child = {k: v for k, v in environment.items() if not k.startswith(left_out)}
    if pool is None:
        return child
    kind = "router" if pool in ROUTER_POOLS else "worker"
    own = child.get(f"{REDIS_URL_OF_KIND}{kind}", child.get(REDIS_URL_VARIABLE, ""))
    child = {k: v for k, v in child.items() if not k.startswith(REDIS_URL_OF_KIND)}
    return {**child, REDIS_URL_VARIABLE: own}


def _record_path(run_folder: Path, process_id: str) -> Path:
    return run_folder / "processes" / f"{process_id}.json"
