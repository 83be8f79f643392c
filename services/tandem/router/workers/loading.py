"""Tracks the workers that load their model, and which of them are alive. Does no I/O.

Each worker that loads its model writes a notice to Redis, with the number of loaded bytes. If
loading fails, the notice contains the reason. If the worker dies, the notice stays unchanged. The
router measures the time since it last saw the notice change, because the clocks of hosts differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.net.store.registry import LoadingNotice

_FORGOTTEN_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadingNow:
    """The state of a worker that loads its model.

    `silent_s` is the number of seconds since the notice last changed; 0 if it changed recently.
    """

    notice: LoadingNotice
    stalled_s: float = 0.0  # seconds since the number of loaded bytes last grew
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _DatedNotice:
    notice: LoadingNotice
    changed_at: float  # monotonic seconds of the last change of the notice
    moved_at: float  # monotonic seconds when the number of loaded bytes last grew


class LoadingWorkers:
    """The notices that a router has read from Redis."""

    def __init__(self) -> None:
        self._notices: dict[str, _DatedNotice] = {}

    def note(self, notices: Mapping[str, LoadingNotice], now: float) -> list[str]:
        """Takes all notices. Returns the workers whose notice is too old and should be removed."""
        before = self._notices
        self._notices = {}
        for worker_id, notice in notices.items():
            last = before.get(worker_id, _DatedNotice(notice, now, now))
            if last.notice.num_bytes != notice.num_bytes:
                last = replace(last, moved_at=now)
            if last.notice != notice:
                last = replace(last, notice=notice, changed_at=now)
            self._notices[worker_id] = last
        return [
            n for n, last in self._notices.items() if now - last.changed_at > _FORGOTTEN_AFTER_S
        ]

    def now(self, now: float, ttl_s: float) -> dict[str, LoadingNow]:
        """Returns the state of each notice. A notice that has not changed for `ttl_s` is silent."""
        return {
            name: LoadingNow(
                last.notice,
                now - last.moved_at,
                0.0 if now - last.changed_at < ttl_s else now - last.changed_at,
            )
            for name, last in self._notices.items()
        }
