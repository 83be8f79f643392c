"""Workers that load their model, as they tell it, and which of them are alive. Pure.

A notice stays where its worker died, and one of a worker that failed says why. Clocks of hosts
differ, so a notice is dated by when it changed, by this router's own clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.net.store.registry import LoadingNotice

_FORGOTTEN_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadingNow:
    """A notice as of now. `silent_s` is 0 while it changes, as it does each second."""

    notice: LoadingNotice
    stalled_s: float = 0.0  # since a byte more of weights was loaded
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Told:
    notice: LoadingNotice
    changed_at: float  # monotonic seconds
    moved_at: float  # when more was loaded


class LoadingWorkers:
    """The notices that a router has read."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def note(self, told: Mapping[str, LoadingNotice], now: float) -> list[str]:
        """Takes in all notices; returns the workers whose notice has not changed for long."""
        before = self._told
        self._told = {}
        for worker_id, notice in told.items():
            last = before.get(worker_id, _Told(notice, now, now))
            if last.notice.num_bytes != notice.num_bytes:
                last = replace(last, moved_at=now)
            if last.notice != notice:
                last = replace(last, notice=notice, changed_at=now)
            self._told[worker_id] = last
        return [n for n, last in self._told.items() if now - last.changed_at > _FORGOTTEN_AFTER_S]

    def now(self, now: float, ttl_s: float) -> dict[str, LoadingNow]:
        """Returns all notices; a worker whose notice has not changed for `ttl_s` is silent."""
        return {
            name: LoadingNow(
                last.notice,
                now - last.moved_at,
                0.0 if now - last.changed_at < ttl_s else now - last.changed_at,
            )
            for name, last in self._told.items()
        }
