"""Ranks that are forked from a process that has imported everything, so that a test with several
ranks does not wait for the imports of torch.

    python -m tests.harness.forked_ranks FD     (started by `rank_template`)
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NoReturn

_MESSAGE_BYTES = 4096
_MOST_FDS = 16


class ForkedRank:
    """A rank's process, with what `members` uses of `subprocess.Popen`. Its exit status is not
    known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return 0

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


@contextmanager
def rank_template() -> Iterator[SimpleNamespace]:
    """Starts the process from which ranks are forked. Yields what takes the place of the module
    `subprocess` in `tandem.engine.executor.ranks.members`, so that it forks ranks."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template = subprocess.Popen(
        [sys.executable, "-m", __name__, str(its.fileno())], pass_fds=(its.fileno(),)
    )
    its.close()

    def start(command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> ForkedRank:
        pipe_fd = int(command[-2])
        numbers = " ".join(map(str, (pipe_fd, *pass_fds)))
        socket.send_fds(ours, [numbers.encode()], list(pass_fds))
        return ForkedRank(int(ours.recv(_MESSAGE_BYTES)))

    yield SimpleNamespace(**{**vars(subprocess), "Popen": start})
    ours.close()
    template.wait()


def main() -> None:
    from tandem.engine.executor import rank_program

    # Ends of children are seen through their pidfd.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    link = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, fds, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, _MOST_FDS)
        if not message:
            return
        pipe_fd, *numbers = map(int, message.split())
        if pid := os.fork():
            link.send(str(pid).encode())
            for fd in fds:
                os.close(fd)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _place(fds, numbers)
        sys.argv = [rank_program.__name__, str(pipe_fd), str(os.getppid())]
        _end(rank_program.main())


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives each descriptor the number that it has in the process of rank 0."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1 + max(numbers)) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
