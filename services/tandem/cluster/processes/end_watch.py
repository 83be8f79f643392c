"""Waits without polling for the end of processes that are not children of this one, and for output
of those that are."""

import os
import select


class EndWatch:
    """Watches processes and their output. Each has a name, which `wait` returns when the process
    has ended, or when there is output."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._names: dict[int, str] = {}  # pidfd, or a copy of the output's descriptor -> name
        self._gone: list[str] = []

    def add(self, name: str, pid: int) -> None:
        """Watches a process. A process that does not exist counts as ended."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone.append(name)
            return
        self._register(name, pidfd)

    def add_output(self, name: str, fd: int) -> None:
        """Watches a pipe until there is something to read, or until its writer has ended."""
        self._register(name, os.dup(fd))

    def forget(self, *names: str) -> None:
        self._gone = [name for name in self._gone if name not in names]
        for pidfd in [fd for fd, name in self._names.items() if name in names]:
            self._close(pidfd)

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Waits until a process has ended, or an output can be read, and returns the name. Each
        name is returned once. Returns None after `timeout_s`."""
        if not self._gone:
            timeout_ms = None if timeout_s is None else round(timeout_s * 1000)
            self._gone += [self._close(pidfd) for pidfd, _ in self._poll.poll(timeout_ms)]
        return self._gone.pop(0) if self._gone else None

    def close(self) -> None:
        """Stops watching."""
        for pidfd in list(self._names):
            self._close(pidfd)

    def _register(self, name: str, fd: int) -> None:
        self._names[fd] = name
        self._poll.register(fd, select.POLLIN)

    def _close(self, pidfd: int) -> str:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        return self._names.pop(pidfd)
