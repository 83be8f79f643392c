"""Watches Ray's head and the pool controller by their keys in Redis. Does no I/O.

Observation in Redis         Conclusion
no pools                     no controller exists (Kubernetes, or workers started by hand)
the heartbeat changes        the controller is alive; a new process id means that it was restarted
the heartbeat stays          problem: the controller is stopped, gone, or cut off from Redis
the head has no address      problem: Ray's head is gone; no problem while the first head starts
"""

from typing import TypeVar

import msgspec

from tandem.net.store.client import UNREADABLE
from tandem.net.store.control_state import BEAT_INTERVAL_S, ControllerBeat, Head

_SILENT_S = 2.5 * BEAT_INTERVAL_S
_T = TypeVar("_T", ControllerBeat, Head)
_SERVED = (
    "requests are served, but pool sizes cannot change, and workers that end are not restarted"
)


class ControlWatch:
    """Watches Ray's head and the pool controller.

    The caller passes the values of both programs' keys in Redis to `note`. `problems` has phrases
    for the headline of the operators' page.
    """

    def __init__(self) -> None:
        self._beat: ControllerBeat | None = None
        self._heard_at = 0.0
        self._now = 0.0
        self._is_kept = False  # True: a controller has written its pools to Redis
        self._head: Head | None = None
        self._head_at = 0.0

    def note(self, *, has_pools: bool, beat: bytes | None, head: bytes | None, now: float) -> str:
        """Takes the values that were read at `now`, in monotonic seconds.

        Returns a text for the log if the controller was restarted, else "".
        """
        restart = ""
        decoded_beat = _decoded(beat, ControllerBeat)
        now_head = _decoded(head, Head) or self._lost_lease()
        # True: Redis did not answer for a while, or this process was paused.
        was_away = now - self._now > _SILENT_S
        if was_away or (has_pools and not self._is_kept) or decoded_beat != self._beat:
            self._heard_at = now
        if decoded_beat and self._beat and decoded_beat.pid != self._beat.pid:
            restart = f"the pool controller was restarted: process {decoded_beat.pid} replaced "
            restart += f"process {self._beat.pid}"
        if now_head != self._head:
            self._head_at = now
        self._now = now
        self._is_kept = has_pools
        self._beat = decoded_beat or self._beat
        self._head = now_head
        return restart

    @property
    def controller_silent_s(self) -> float:
        """Seconds since the controller's last heartbeat; 0 while the next one is not overdue."""
        age_s = self._now - self._heard_at
        return age_s if self._is_kept and age_s > _SILENT_S else 0.0

    @property
    def head_is_gone(self) -> bool:
        is_without = self._head is not None and not self._head.address
        return self._is_kept and is_without and not self.head_is_starting

    @property
    def head_is_starting(self) -> bool:
        """True while `tandem up` starts Ray's first head, which will start a pool controller."""
        head = self._head
        if head is None or head.address or head.why:
            return False
        # On several machines (`number` is not 0), a controller that has written its pools shows
        # that a head ran before and was lost. Then the head that starts is not the first.
        return not (head.number and self._is_kept)

    @property
    def is_kept(self) -> bool:
        """True if a pool controller manages this cluster."""
        return self._is_kept

    @property
    def problems(self) -> dict[str, str]:
        """Maps "head" or "controller" to a phrase if that program is faulty. Empty if both work."""
        if self.head_is_gone:
            assert self._head is not None
            why = f" ({self._head.why})" if self._head.why else ""
            since_s = self._now - self._head_at
            return {"head": f"Ray's head has been down for {since_s:.0f} s{why}: {_SERVED}"}
        if silent_s := self.controller_silent_s:
            text = f"the pool controller has not reported for {silent_s:.0f} s: {_SERVED}"
            return {"controller": text}
        return {}

    def _lost_lease(self) -> Head | None:
        """Returns the state to assume for Ray's head when the head's key is missing in Redis.

        On several machines, the key expires when the host of the head is lost. So the returned
        state has no address. Returns None on a single machine.
        """
        if self._head is None or not self._head.number:
            return None
        return Head(
            self._head.number,
            self._head.host,
            why=f"host {self._head.host} stopped renewing its lease",
        )


def _decoded(text: bytes | None, kind: type[_T]) -> _T | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except UNREADABLE:
        return None
