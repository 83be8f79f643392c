"""The pools as the autoscaler sees them, from what placement sees of their workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_high, median_low

from tandem.autoscaler.signals import PoolSeen
from tandem.cost_model import DEFAULT_DECODE, DecodeRate
from tandem.router.placement.costs import WorkerSnapshot, queue_s


def see_pool(role: str, workers: Iterable[WorkerSnapshot], *, wanted: int) -> PoolSeen:
    """`wanted` is the pool's size: it may have workers that still start, or drain."""
    ready = [w for w in workers if w.role == role and w.usable]
    return PoolSeen(
        wanted=wanted,
        num_ready=len(ready),
        queued_s=sum(queue_s(w) for w in ready),
        num_waiting=sum(w.num_waiting for w in ready),
        kv_use=median_high(w.kv_use for w in ready) if ready else 0.0,
    )


def likely_decode(workers: Iterable[WorkerSnapshot]) -> DecodeRate:
    """Of the decode worker in the middle of those that have measured; a guess before."""
    known = [w.rates.decode for w in workers if w.role == "decode" and w.rates.measured]
    if not known:
        return DEFAULT_DECODE
    middle = median_low(rate.sequence_s for rate in known)
    return next(rate for rate in known if rate.sequence_s == middle)
