"""Several simulated machines on one, each with its own network, PID, IPC and mount namespaces.

created -> `run` -> running -> `kill`, or the command ends -> `run` ...
                   |  ^
                `stop` '--' `go_on`      and `Network.cut` and `heal` at any time

With network namespaces alone (network.py), NIXL would treat them as one host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.harness.network import Place
from tests.harness.network import why_not as why_no_network

_ROOT = Path(__file__).parents[2]
_UNSHARE = ["unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"]


class Machine:
    """A simulated host at `place` that runs one command at a time; `close` ends it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        # Ray's default folder for sockets, within the run folder, would have a too long path.
        self.folder = Path(tempfile.mkdtemp(prefix="a-machine-of-a-test-"))
        self.screen = self.folder / "screen"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return self.place.address

    def run(self, *command: str) -> None:
        """Starts a command; its output is written to the file `screen`."""
        assert self._process is None
        environment = {
            **os.environ,
            "TMPDIR": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "OMP_NUM_THREADS": "1",
        }
        init = [*self.place.prefix, *_UNSHARE, sys.executable, "-m", "tests.harness.host_init"]
        with self.screen.open("wb") as screen:
            self._process = subprocess.Popen(
                [*init, *command],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def text(self) -> str:
        """The command's output so far. Raises AssertionError if the command has ended."""
        text = self.screen.read_text(errors="replace")
        assert self.runs, f"the command of {self.address} ended:\n{text[-3000:]}"
        return text

    def terminate(self) -> None:
        """Stops the command like Ctrl-C, and waits until it has ended."""
        assert self._process is not None
        for pid in self._pids()[:1]:
            os.kill(pid, signal.SIGTERM)
        self._process.wait(90)
        self._process = None

    def kill(self) -> None:
        """Kills every process of the host at once, which simulates a lost machine."""
        if self._process is not None:
            self.go_on()
            self._process.kill()
            self._process.wait()
            self._process = None
            shutil.rmtree(self.folder / "state", ignore_errors=True)

    def stop(self) -> None:
        """Stops every process of the host with SIGSTOP."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def has_process(self, name: str) -> bool:
        """Says whether a process of this name runs on the host."""
        for pid in self._pids():
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    return True
        return False

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _pids(self) -> list[int]:
        """The host's processes with their pids on this machine; the init process is first."""
        if not self.runs:
            return []
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        give_up_at = time.monotonic() + 5
        while not (found := children.read_text().split()):
            if time.monotonic() > give_up_at or not self.runs:
                return []
            time.sleep(0.01)
        init = int(found[0])
        namespace = os.readlink(f"/proc/{init}/ns/pid")
        pids = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.readlink(f"/proc/{entry}/ns/pid") == namespace:
                    pids.append(int(entry))
        return sorted(pids, key=lambda pid: pid != init)


def why_not() -> str:
    """The reason why hosts cannot be simulated on this machine; empty if they can."""
    if reason := why_no_network():
        return reason
    if shutil.which("unshare") is None:
        return "there is no `unshare` (util-linux)"
    tried = subprocess.run(
        [*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True
    )
    return f"namespaces are not permitted: {tried.stderr.decode()}" if tried.returncode else ""
