"""Shares count the recent prefill work that each worker was given. Pure.

    sent  the predicted seconds are added to its share
    time  a share counts half after `HALF_LIFE_S`

Shares are kept in seconds of the moment when this was made, which shrink by the half-life: so a
share changes only when something happens to its worker, and nobody walks all of them as time goes
by. With several routers each keeps the shares of what it sent itself; where each of them is even,
the sum is.
"""

# Long against a prompt (seconds), so that one long prompt does not make a worker's share; short
# against the time in which pools are resized and habits of clients change.
HALF_LIFE_S = 300.0
REBASE_S = 100 * HALF_LIFE_S


class Shares:
    """The workers' shares of recent prefill. `now_s` is of a monotonic clock that began near 0."""

    def __init__(self) -> None:
        self._placed: dict[str, float] = {}
        self._origin_s = 0.0

    def second(self, now_s: float) -> float:
        """Weight of one second of prefill in a share, at `now_s`."""
        return float(2.0 ** ((now_s - self._origin_s) / HALF_LIFE_S))

    def rebase(self, now_s: float) -> bool:
        """Rescales all shares before numbers grow out of bounds, after days; True if it did so."""
        elapsed_s = now_s - self._origin_s
        if elapsed_s < REBASE_S:
            return False
        # Not 1 / second(now_s): after a pause of 1,024 half-lives (85 h) that is past all floats,
        # while this becomes 0.
        scale = 2.0 ** (-elapsed_s / HALF_LIFE_S)
        self._placed = {name: placed * scale for name, placed in self._placed.items()}
        self._origin_s = now_s
        return True

    def join(self, worker_id: str, placed: float) -> None:
        """Adds a new or returned worker; `placed` is the mean share, so that not all goes to it."""
        self._placed[worker_id] = placed

    def leave(self, worker_id: str) -> None:
        self._placed.pop(worker_id, None)

    def placed(self, worker_id: str) -> float:
        return self._placed[worker_id]

    def sent(self, worker_id: str, prefill_s: float, now_s: float) -> None:
        """A prompt that is predicted to take `prefill_s` seconds goes there."""
        self._placed[worker_id] += prefill_s * self.second(now_s)
