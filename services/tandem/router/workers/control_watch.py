"""Ray's head and the pool controller as a router sees them: their signs of life in Redis. Pure.

no pools in Redis    there is no controller (Kubernetes, or workers started by hand): no problem
beat changes         it lives; one of another process was started again, which is news
beat stands still    it is stopped, gone, or cut off from Redis; so is one with no head
"""

from typing import TypeVar

import msgspec

from tandem.net.store.client import UNREADABLE
from tandem.net.store.control_state import BEAT_INTERVAL_S, ControllerBeat, Head

_SILENT_S = 2.5 * BEAT_INTERVAL_S
_T = TypeVar("_T", ControllerBeat, Head)
_SERVED = "requests are served; sizes stand, and workers that end are not started again"


class ControlWatch:
    """Watches Ray's head and the pool controller. `note` takes what Redis has of them; `problems`
    are phrases of the headline."""

    def __init__(self) -> None:
        self._beat: ControllerBeat | None = None
        self._heard_at = 0.0
        self._now = 0.0
        self._is_kept = False  # by a controller: it has written its pools
        self._head: Head | None = None
        self._head_at = 0.0

    def note(self, *, has_pools: bool, beat: bytes | None, head: bytes | None, now: float) -> str:
        """Takes in what was read at this time, in monotonic seconds; returns what is new of a
        controller that was started again, else nothing."""
        news = ""
        told = _decoded(beat, ControllerBeat)
        now_head = _decoded(head, Head) or self._lost_lease()
        was_away = now - self._now > _SILENT_S  # Redis, or this process stood still
        if was_away or (has_pools and not self._is_kept) or told != self._beat:
            self._heard_at = now
        if told and self._beat and told.pid != self._beat.pid:
            news = f"the pool controller was started again: process {told.pid}"
            news += f", before {self._beat.pid}"
        if now_head != self._head:
            self._head_at = now
        self._now = now
        self._is_kept = has_pools
        self._beat = told or self._beat
        self._head = now_head
        return news

    @property
    def controller_silent_s(self) -> float:
        """Seconds for which the controller has missed its beats; 0 while it may still be on
        time."""
        age_s = self._now - self._heard_at
        return age_s if self._is_kept and age_s > _SILENT_S else 0.0

    @property
    def head_is_gone(self) -> bool:
        return self._is_kept and self._head is not None and not self._head.address

    @property
    def is_kept(self) -> bool:
        """Returns whether a pool controller keeps this cluster."""
        return self._is_kept

    @property
    def problems(self) -> dict[str, str]:
        """A phrase for the part that is not well."""
        if self.head_is_gone:
            assert self._head is not None
            why = f" ({self._head.why})" if self._head.why else ""
            since_s = self._now - self._head_at
            return {"head": f"Ray's head is gone{why} for {since_s:.0f} s: {_SERVED}"}
        if silent_s := self.controller_silent_s:
            told = f"the pool controller has told nothing for {silent_s:.0f} s: {_SERVED}"
            return {"controller": told}
        return {}

    def _lost_lease(self) -> Head | None:
        """Returns the head after its key has gone: a lease has ended, with its host."""
        if self._head is None or not self._head.number:
            return None
        return Head(self._head.number, self._head.host, why=f"host {self._head.host} has lost it")


def _decoded(text: bytes | None, kind: type[_T]) -> _T | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except UNREADABLE:
        return None
