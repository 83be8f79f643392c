"""Decides whether workers have capacity for one more request, or it waits in the router. Pure.

They have while one of those who prefill has little queued, and a decode worker few that wait. The
queue is long enough that nobody falls idle before its next load is told and a request arrives.
"""

from collections.abc import Iterable

from tandem.common.perf_model.predict import likely_rates, token_seconds
from tandem.common.perf_model.rates import WorkerRates
from tandem.router.placement.costs import WorkerSnapshot

# Of prefill, at a worker that has capacity. A record is up to 1.5 s old when it is read.
QUEUED_MAX_S = 3.0
WAITING_MAX = 4  # sequences at a decode worker that has capacity
COMPLETION_TOKENS_LIKELY = 256  # of a request that may make more


def has_capacity(workers: Iterable[WorkerSnapshot], *, queued_max_s: float) -> bool:
    """Returns whether a request may go now; True without decode workers: that is another wait."""
    usable = [w for w in workers if w.usable]
    decode = [w for w in usable if w.role == "decode"]
    prefill = [w for w in usable if w.role == "prefill"]
    free = [w for w in decode if w.num_waiting < WAITING_MAX]
    if not decode:
        return True
    return bool(free) and any(w.queue_s <= queued_max_s for w in prefill or free)


def work_s(workers: Iterable[WorkerSnapshot], num_missing: int, completion_max: int) -> float:
    """Estimates the seconds that a request takes of one worker's time: its tokens to prefill, and
    one sequence in so many decode steps."""
    rates = likely_rates(w.rates for w in workers) or WorkerRates()
    completion = min(completion_max, COMPLETION_TOKENS_LIKELY)
    return max(num_missing * token_seconds(rates) + completion * rates.decode.sequence_s, 1e-9)
