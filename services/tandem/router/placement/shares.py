"""Counts the recent prefill work that each worker was given. Pure.

    sent  the predicted seconds are added to the worker's share
    time  a share counts half after `HALF_LIFE_S`
Shares are kept in units of one second of prefill at the time of creation, which lose weight by the
half-life. So a share changes only when its worker gets work, and no loop over all workers is needed
as time passes. Each of several routers keeps the shares of its own requests; if each one is
balanced, the sum is balanced.
"""

# Long compared with a prompt (seconds), so that one long prompt does not dominate a share. Short
# compared with changes of pool sizes and of the clients' load.
HALF_LIFE_S = 300.0
REBASE_S = 100 * HALF_LIFE_S


class Shares:
    """The workers' shares of recent prefill. `now_s` is a monotonic time that began near 0."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._origin_s = 0.0

    def second_weight(self, now_s: float) -> float:
        """Returns the weight of one second of prefill in a share at `now_s`."""
        return float(2.0 ** ((now_s - self._origin_s) / HALF_LIFE_S))

    def rebase(self, now_s: float) -> bool:
        """Rescales all shares after days, before the numbers overflow; returns whether it did."""
        elapsed_s = now_s - self._origin_s
        if elapsed_s < REBASE_S:
            return False
        # Not 1 / second_weight(now_s), which overflows after a pause of 1,024 half-lives (85 h);
        # this becomes 0.
        scale = 2.0 ** (-elapsed_s / HALF_LIFE_S)
        self._shares = {name: share * scale for name, share in self._shares.items()}
        self._origin_s = now_s
        return True

    def join(self, worker_id: str, mean_share: float) -> None:
        """Adds a new or returned worker.

        `mean_share` is the mean share, so that the worker does not get all requests.
        """
        self._shares[worker_id] = mean_share

    def leave(self, worker_id: str) -> None:
        self._shares.pop(worker_id, None)

    def share(self, worker_id: str) -> float:
        return self._shares[worker_id]

    def sent(self, worker_id: str, prefill_s: float, now_s: float) -> None:
        """Adds a prompt of `prefill_s` predicted seconds to the worker's share."""
        self._shares[worker_id] += prefill_s * self.second_weight(now_s)
