"""Keeps the latest snapshots of all workers, and sums over them, for placement. Does no I/O.

A router keeps one roster, and updates the roster when a worker changes. Sums and counts over all
workers are kept up to date, so that the placement of a request need not iterate over all workers.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from tandem.router.placement.costs import WorkerSnapshot


class Roster:
    """The latest snapshot of each worker, by worker id, with counts and sums over the workers.

    `second_weight` is the number that one second of prefill now adds to a worker's `prefill_share`
    (`shares.py`). `full_share` is the share of a worker that always computed prompts; 0: unknown.
    """

    __slots__ = (
        "_pools",
        "_sums",
        "by_id",
        "compatibility_keys",
        "full_share",
        "num_unmeasured",
        "num_with_tiers",
        "second_weight",
    )

    def __init__(self, workers: Iterable[WorkerSnapshot] = ()) -> None:
        self.by_id: dict[str, WorkerSnapshot] = {}
        self.second_weight = 1.0
        self.full_share = 0.0
        self.num_with_tiers = 0  # number of workers that load blocks from a tier
        self.num_unmeasured = 0  # number of workers that have not measured their rates yet
        # KV compatibility key -> number of workers with this key. Except during an upgrade, all
        # workers have the same key.
        self.compatibility_keys: Counter[bytes] = Counter()
        self._pools: dict[str, list[str]] = {}
        # role -> [number of usable workers, sum of the usable workers' `prefill_share`]
        self._sums: dict[str, list[float]] = {}
        for worker in workers:
            self.put(worker)

    def put(self, worker: WorkerSnapshot) -> None:
        """Adds a worker or replaces its snapshot."""
        known = self.by_id.get(worker.worker_id)
        if known is None or known.compatibility_key != worker.compatibility_key:
            self.compatibility_keys[worker.compatibility_key] += 1
            if known is not None:
                self._drop_key(known)
        if known is None or known.role != worker.role:
            if known is not None:
                self._pools[known.role].remove(worker.worker_id)
            self._pools.setdefault(worker.role, []).append(worker.worker_id)
            self._sums.setdefault(worker.role, [0.0, 0.0])
        if known is not None:
            self._count(known, -1)
        self._count(worker, 1)
        self.by_id[worker.worker_id] = worker

    def remove(self, worker_id: str) -> None:
        """Removes a worker; does nothing if the worker is unknown."""
        known = self.by_id.pop(worker_id, None)
        if known is not None:
            self._drop_key(known)
            self._pools[known.role].remove(worker_id)
            self._count(known, -1)

    def _count(self, worker: WorkerSnapshot, sign: int) -> None:
        self.num_with_tiers += sign * bool(worker.rates.tiers)
        self.num_unmeasured += sign * (not worker.rates.measured)
        if worker.usable:
            sums = self._sums[worker.role]
            sums[0] += sign
            sums[1] += sign * worker.prefill_share

    def _drop_key(self, worker: WorkerSnapshot) -> None:
        self.compatibility_keys[worker.compatibility_key] -= 1
        if not self.compatibility_keys[worker.compatibility_key]:
            del self.compatibility_keys[worker.compatibility_key]

    def pool(self, role: str) -> Sequence[str]:
        """Returns the ids of the workers with this role, in the order in which they were added."""
        return self._pools.get(role, ())

    def mean_prefill_share(self, role: str) -> float:
        """Returns the mean `prefill_share` of the usable workers with this role."""
        count, total = self._sums.get(role, (0.0, 0.0))
        return total / count if count else 0.0
