"""The workers as placement reads them: by id, and each pool's ids. Pure.

Taking in one worker's news costs the same among eight and among a thousand, so who keeps a roster
over many requests (the simulator) never walks all workers for one of them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from tandem.router.placement.costs import WorkerSnapshot


class Roster:
    """Holds one snapshot for each worker id, the last that was put.

    `second` is what a second of prefill counts in the workers' shares (`shares.py`).
    """

    __slots__ = ("_pools", "_sums", "by_id", "compatibility_keys", "num_with_tiers", "second")

    def __init__(self, workers: Iterable[WorkerSnapshot] = ()) -> None:
        self.by_id: dict[str, WorkerSnapshot] = {}
        self.second = 1.0
        self.num_with_tiers = 0  # workers that load blocks from a tier below their pool
        # Of all workers: one key but in an upgrade.
        self.compatibility_keys: Counter[bytes] = Counter()
        self._pools: dict[str, list[str]] = {}
        self._sums: dict[str, list[float]] = {}  # by role: usable workers, and their shares
        for worker in workers:
            self.put(worker)

    def put(self, worker: WorkerSnapshot) -> None:
        """Adds a worker, or replaces its snapshot."""
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
        """Removes a worker that left; does nothing for one that never came."""
        known = self.by_id.pop(worker_id, None)
        if known is not None:
            self._drop_key(known)
            self._pools[known.role].remove(worker_id)
            self._count(known, -1)

    def _count(self, worker: WorkerSnapshot, sign: int) -> None:
        self.num_with_tiers += sign * bool(worker.rates.tiers)
        if worker.usable:
            sums = self._sums[worker.role]
            sums[0] += sign
            sums[1] += sign * worker.placed

    def _drop_key(self, worker: WorkerSnapshot) -> None:
        self.compatibility_keys[worker.compatibility_key] -= 1
        if not self.compatibility_keys[worker.compatibility_key]:
            del self.compatibility_keys[worker.compatibility_key]

    def pool(self, role: str) -> Sequence[str]:
        """Ids of the workers of this role, in the order in which they came."""
        return self._pools.get(role, ())

    def mean_placed(self, role: str) -> float:
        """Mean share of the usable workers of this role."""
        count, total = self._sums.get(role, (0.0, 0.0))
        return total / count if count else 0.0
