from __future__ import annotations

import time
from random import Random

from redis.asyncio import Redis

from tandem.config import ClusterConfig, RouterConfig
from tandem.cost_model import DecodeRate, PrefillRate, WorkerRates
from tandem.router.admission.calibration import Promise
from tandem.router.admission.gate import Gate
from tandem.router.metrics.router import Metrics
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot, choose
from tandem.router.workers.cluster_view import ClusterView

RATES = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), DecodeRate(0.0, 0.0), 512, measured=True)


def asked(gate: Gate, tokens: int, rates: WorkerRates = RATES) -> Promise | None:
    """A prompt that takes a millisecond a token on a worker where nobody else is."""
    worker = WorkerSnapshot("d", "d/1", "", "decode", "ready", rates=rates)
    placement = choose(Work(tokens), [worker], {}, Random(0))
    assert isinstance(placement, Placement)
    return gate.admit(Work(tokens), placement, tenant="")


def gate_of(limit_s: float) -> Gate:
    view = ClusterView(ClusterConfig("test", "redis://127.0.0.1", "token"), Redis())
    view.redis_state = "ok"
    return Gate(RouterConfig(view.cluster, "", "", ttft_limit_s=limit_s), view, Metrics())


def test_what_says_something_of_long_waits_does_not_depend_on_what_was_learned() -> None:
    """Else a margin that fell would let shorter waits count, and they would keep it small."""
    gate = gate_of(limit_s=2.0)
    assert asked(gate, 300) is None
    for late in (0.1, 3.0) * 50:  # a wide spread: as much is kept back as may be
        promise = asked(gate, 700)
        assert promise is not None
        gate.note_first_token(Promise(promise.predicted_s, time.monotonic() - late))
    assert asked(gate, 300) is None


def test_guesses_teach_nothing() -> None:
    assert asked(gate_of(limit_s=2.0), 1900, WorkerRates()) is None
