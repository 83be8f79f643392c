"""Says which decode workers should hand back waiting requests, because others have room. Pure.

A waiting request holds no KV yet, so nothing is lost when it waits, or runs, elsewhere. A worker
has room if nobody waits there, a running slot is free and hardly any prompt is queued.
"""

from collections.abc import Iterable

from tandem.router.placement.costs import WorkerSnapshot

QUEUED_MAX_S = 0.1  # of prefill, at a worker that has room


def find_moves(workers: Iterable[WorkerSnapshot]) -> dict[str, int]:
    """Returns how many of its waiting requests each worker should hand back, by worker id: as many
    as find a free running slot elsewhere, from the longest queues."""
    decode = [w for w in workers if w.role == "decode" and w.usable and w.num_running_slots]
    num_free = sum(_num_free(w) for w in decode)
    moves: dict[str, int] = {}
    for worker in sorted(decode, key=lambda w: -w.num_waiting):
        if (count := min(num_free, worker.num_waiting)) <= 0:
            break
        moves[worker.worker_id] = count
        num_free -= count
    return moves


def _num_free(worker: WorkerSnapshot) -> int:
    if worker.num_waiting or worker.queue_s > QUEUED_MAX_S:
        return 0
    return max(0, worker.num_running_slots - worker.num_running - worker.num_pulls)
