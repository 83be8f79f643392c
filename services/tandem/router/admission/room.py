"""Whether workers have room for one more request, or it waits in the router. Pure.

They have while one of those who prefill has little queued, and a decode worker few that wait. The
queue is long enough that nobody falls idle before its next load is told and a request arrives.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.cost_model import DEFAULT_DECODE, WorkerRates
from tandem.router.placement.costs import TOKEN_S, WorkerSnapshot

# Of prefill, at a worker that has room. A record is up to 1.5 s old when it is read.
QUEUED_MAX_S = 3.0
WAITING_MAX = 4  # sequences at a decode worker that has room
COMPLETION_TOKENS_LIKELY = 256  # of a request that may make more


def has_room(workers: Iterable[WorkerSnapshot], *, queued_max_s: float) -> bool:
    """True when there is no decode worker, too: that is another wait."""
    usable = [w for w in workers if w.usable]
    decode = [w for w in usable if w.role == "decode"]
    prefill = [w for w in usable if w.role == "prefill"]
    free = [w for w in decode if w.num_waiting < WAITING_MAX]
    if not decode:
        return True
    return bool(free) and any(_queued_s(w) <= queued_max_s for w in prefill or free)


def work_s(workers: Iterable[WorkerSnapshot], num_missing: int, completion_max: int) -> float:
    """What a request takes of one worker's time, in all, as far as can be told before: tokens to
    prefill, and one sequence in so many decode steps."""
    rates = next((w.rates for w in workers if w.rates.measured), None)
    token_s = TOKEN_S if rates is None else _token_s(rates)
    sequence_s = (DEFAULT_DECODE if rates is None else rates.decode).sequence_s
    completion = min(completion_max, COMPLETION_TOKENS_LIKELY)
    return max(num_missing * token_s + completion * sequence_s, 1e-9)


def _queued_s(worker: WorkerSnapshot) -> float:
    return worker.queued_tokens * (_token_s(worker.rates) if worker.rates.measured else TOKEN_S)


def _token_s(rates: WorkerRates) -> float:
    return rates.prefill.token_s + rates.prefill.step_s / rates.step_tokens
