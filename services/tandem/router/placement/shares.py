"""Counts the recent prefill work of each worker, called the worker's share. Does no I/O.

When a prompt is sent to a worker, the prompt's predicted prefill seconds are added to the worker's
share. Work of 300 s ago (`HALF_LIFE_S`) must count half as much as new work. Instead of halving all
shares every 300 s, new work is added with a weight that doubles every 300 s (`second_weight`).
Example: 1 s of prefill adds 1.0 to a share at time 0, 2.0 after 300 s and 4.0 after 600 s. So the
value of a share has no unit, and only the ratio of two shares has a meaning.

Each router keeps the shares of its own requests. If each router balances its shares, the total work
of the workers is balanced, too.
"""

import math

# Seconds after which work counts half. A prompt takes a few seconds, so one long prompt does not
# dominate a share. The load of a cluster usually changes more slowly than this.
HALF_LIFE_S = 300.0
REBASE_S = 100 * HALF_LIFE_S


class Shares:
    """The workers' shares of recent prefill work.

    `now_s` is the time of a monotonic clock that was near 0 when this object was created.
    """

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._origin_s = 0.0

    def second_weight(self, now_s: float) -> float:
        """Returns the amount that one second of prefill adds to a share at `now_s`."""
        return float(2.0 ** ((now_s - self._origin_s) / HALF_LIFE_S))

    def full_share(self, now_s: float) -> float:
        """Returns the share of a worker that has computed prompts without a pause since time 0.

        Example: a worker with half of this share has computed prompts in half of the recent time.
        """
        first_weight = float(2.0 ** (-self._origin_s / HALF_LIFE_S))
        return (self.second_weight(now_s) - first_weight) * HALF_LIFE_S / math.log(2.0)

    def rebase(self, now_s: float) -> bool:
        """Rescales all shares once every `REBASE_S` seconds, so that the numbers do not overflow.

        Returns whether the shares were rescaled.
        """
        elapsed_s = now_s - self._origin_s
        if elapsed_s < REBASE_S:
            return False
        # Do not use `1 / second_weight(now_s)` here: `second_weight` overflows after 1,024
        # half-lives (85 h), but this negative power only becomes 0.
        scale = 2.0 ** (-elapsed_s / HALF_LIFE_S)
        self._shares = {name: share * scale for name, share in self._shares.items()}
        self._origin_s = now_s
        return True

    def join(self, worker_id: str, mean_share: float) -> None:
        """Adds a new or returned worker with the mean share of the other workers.

        A worker whose share began at 0 would get all requests until its share had reached those of
        the other workers.
        """
        self._shares[worker_id] = mean_share

    def leave(self, worker_id: str) -> None:
        self._shares.pop(worker_id, None)

    def share(self, worker_id: str) -> float:
        return self._shares[worker_id]

    def sent(self, worker_id: str, prefill_s: float, now_s: float) -> None:
        """Adds a prompt of `prefill_s` predicted seconds to the worker's share."""
        self._shares[worker_id] += prefill_s * self.second_weight(now_s)
