"""Decides whether workers have capacity for one more request. Does no I/O.

Without capacity, the request waits in the router. There is capacity if a prefill worker has a short
queue, and a decode worker has few waiting sequences and soon a free running slot. A short queue,
instead of an empty one, keeps a worker busy until the router has read the worker's next load report
and sent another request.
"""

from collections.abc import Iterable

from tandem.common.perf_model.predict import likely_rates, token_seconds
from tandem.common.perf_model.rates import WorkerRates
from tandem.router.admission.calibration import Calibration
from tandem.router.placement.costs import Work, WorkerSnapshot, slot_wait_s

# A worker has capacity if it can compute its prefill queue in at most this many seconds, and if a
# request would wait for a running slot for at most this many seconds. A load
# report may be 1.5 s old, so a shorter queue could become empty before the router learns of it.
QUEUED_MAX_S = 3.0
# Until the length of answers is known, a decode worker has capacity if fewer sequences than this
# wait in its queue.
WAITING_MAX = 4
# A request is assumed to generate `max_tokens` output tokens, but at most this many.
COMPLETION_TOKENS_LIKELY = 256
_SHORT = Work(1)  # a request that needs one KV block


def has_capacity(
    workers: Iterable[WorkerSnapshot], *, queued_max_s: float, completion_tokens: float = 0.0
) -> bool:
    """Returns whether the workers have capacity for one more request.

    `completion_tokens` is the mean number of output tokens of a request; 0 if unknown.
    Without decode workers the result is True, because the dispatcher then holds the request until a
    decode worker is ready.
    """
    usable = [w for w in workers if w.usable]
    decode = [w for w in usable if w.role == "decode"]
    prefill = [w for w in usable if w.role == "prefill"]
    free = [w for w in decode if _has_slot(w, queued_max_s, completion_tokens)]
    if not decode:
        return True
    return bool(free) and any(w.queue_s <= queued_max_s for w in prefill or free)


def _has_slot(worker: WorkerSnapshot, queued_max_s: float, completion_tokens: float) -> bool:
    if not completion_tokens:
        return worker.load.num_waiting < WAITING_MAX
    return slot_wait_s(_SHORT, worker, completion_tokens) <= queued_max_s


def queued_max_s(limit_s: float, calibration: Calibration) -> float:
    """Returns the limit of a prefill queue in seconds: a worker with a longer queue has no
    capacity.

    `limit_s` is the limit of the TTFT, without the part for the prompt's tokens; 0: no limit. The
    result is at most half of the queue length at which requests are refused. So, as the load grows,
    requests begin to wait for their turns before any request is refused.
    """
    if not limit_s:
        return QUEUED_MAX_S
    refused_s = calibration.margin * limit_s / calibration.factor
    return min(QUEUED_MAX_S, refused_s / 2)


def work_s(workers: Iterable[WorkerSnapshot], num_missing: int, num_completion: int) -> float:
    """Estimates how many seconds of worker time a request takes.

    The result is the time to prefill the `num_missing` tokens of the prompt that are not cached,
    plus the time by which the request lengthens the decode steps that generate its output of
    `num_completion` tokens.
    """
    rates = likely_rates(w.rates for w in workers) or WorkerRates()
    return max(num_missing * token_seconds(rates) + num_completion * rates.decode.sequence_s, 1e-9)
