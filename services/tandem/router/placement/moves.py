"""Finds decode workers that should return waiting requests to the router. Does no I/O.

The router then submits the returned requests to decode workers with room. A waiting request has no
KV yet, so no computed KV is lost. A worker has room if no sequence waits there, a running slot is
free, and the worker's prefill queue is nearly empty.
"""

from collections.abc import Iterable

from tandem.router.placement.costs import WorkerSnapshot

QUEUED_MAX_S = 0.1  # a worker has room only if it can compute its prefill queue in this time


def find_moves(workers: Iterable[WorkerSnapshot]) -> dict[str, int]:
    """Returns worker id -> number of waiting requests that the worker should return.

    Example: the workers with room have 3 free running slots, and 2 and 5 requests wait at two other
    workers. Then the worker where 5 wait returns 3 requests.
    """
    decode = [w for w in workers if w.role == "decode" and w.usable and w.load.num_running_slots]
    num_free = sum(_num_free(w) for w in decode)
    moves: dict[str, int] = {}
    for worker in sorted(decode, key=lambda w: -w.load.num_waiting):
        if (count := min(num_free, worker.load.num_waiting)) <= 0:
            break
        moves[worker.worker_id] = count
        num_free -= count
    return moves


def _num_free(worker: WorkerSnapshot) -> int:
    load = worker.load
    if load.num_waiting or worker.queue_s > QUEUED_MAX_S:
        return 0
    return max(0, load.num_running_slots - load.num_slots_taken)
