"""Decides whether workers have capacity for one more request. Does no I/O.

Without capacity, the request waits in the router. There is capacity if a prefill worker has a short
queue and a decode worker has few waiting sequences. A short queue, instead of an empty one, keeps a
worker busy until the router has read the worker's next load report and sent another request.
"""

from collections.abc import Iterable

from tandem.common.perf_model.predict import likely_rates, token_seconds
from tandem.common.perf_model.rates import WorkerRates
from tandem.router.placement.costs import WorkerSnapshot

# A worker has capacity if it can compute its prefill queue in at most this many seconds. A load
# report may be 1.5 s old, so a shorter queue could become empty before the router learns of it.
QUEUED_MAX_S = 3.0
WAITING_MAX = 4  # a decode worker has capacity if fewer sequences than this wait in its queue
# A request is assumed to generate `max_tokens` output tokens, but at most this many.
COMPLETION_TOKENS_LIKELY = 256


def has_capacity(workers: Iterable[WorkerSnapshot], *, queued_max_s: float) -> bool:
    """Returns whether the workers have capacity for one more request.

    Without decode workers the result is True, because the dispatcher then holds the request until a
    decode worker is ready.
    """
    usable = [w for w in workers if w.usable]
    decode = [w for w in usable if w.role == "decode"]
    prefill = [w for w in usable if w.role == "prefill"]
    free = [w for w in decode if w.load.num_waiting < WAITING_MAX]
    if not decode:
        return True
    return bool(free) and any(w.queue_s <= queued_max_s for w in prefill or free)


def work_s(workers: Iterable[WorkerSnapshot], num_missing: int, completion_max: int) -> float:
    """Estimates how many seconds of worker time a request takes.

    The result is the time to prefill the `num_missing` tokens of the prompt that are not cached,
    plus the time by which the request lengthens the decode steps that generate its output.
    """
    rates = likely_rates(w.rates for w in workers) or WorkerRates()
    completion = min(completion_max, COMPLETION_TOKENS_LIKELY)
    return max(num_missing * token_seconds(rates) + completion * rates.decode.sequence_s, 1e-9)
