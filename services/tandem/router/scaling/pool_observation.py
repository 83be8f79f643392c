"""Computes what the autoscaler observes of a pool, from snapshots of the workers. Does no I/O."""

from collections.abc import Iterable
from statistics import median_high

from tandem.common.perf_model.predict import likely_rates
from tandem.common.perf_model.rates import DecodeRate, WorkerRates
from tandem.router.autoscaler.demand import PoolSeen
from tandem.router.placement.costs import WorkerSnapshot


def see_pool(role: str, workers: Iterable[WorkerSnapshot], *, wanted: int) -> PoolSeen:
    """Returns the observation of a pool.

    `wanted` is the pool's target size. It may differ from the number of workers that are ready.
    """
    ready = [w for w in workers if w.role == role and w.usable]
    return PoolSeen(
        wanted=wanted,
        num_ready=len(ready),
        queued_s=sum(w.queue_s for w in ready),
        num_waiting=sum(w.load.num_waiting for w in ready),
        kv_use=median_high(w.load.kv_use for w in ready) if ready else 0.0,
        num_running=sum(w.load.num_requests - w.load.num_waiting for w in ready),
    )


def likely_decode(workers: Iterable[WorkerSnapshot]) -> DecodeRate:
    """Returns the median of the workers' measured decode rates.

    If no worker has measured its rate, an assumed rate is returned.
    """
    rates = (w.rates for w in workers if w.role == "decode")
    return (likely_rates(rates, by=lambda each: each.decode.sequence_s) or WorkerRates()).decode
