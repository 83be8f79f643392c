from __future__ import annotations

import asyncio
import math
import time
from random import Random

import pytest
from redis.asyncio import Redis

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates
from tandem.router.admission.calibration import Promise
from tandem.router.admission.controller import AdmissionController
from tandem.router.admission.turns import Claim
from tandem.router.metrics.router import Metrics
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot, choose
from tandem.router.workers.cluster_view import ClusterView

RATES = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), DecodeRate(0.0, 0.0), 512, measured=True)


def asked(
    controller: AdmissionController, tokens: int, rates: WorkerRates = RATES
) -> Promise | None:
    """A prompt that takes a millisecond a token on a worker where nobody else is."""
    worker = WorkerSnapshot("d", "d/1", "", "decode", "ready", rates=rates)
    placement = choose(Work(tokens), [worker], {}, Random(0))
    assert isinstance(placement, Placement)
    return controller.admit(Work(tokens), placement).promise


def gate_of(limit_s: float) -> AdmissionController:
    view = ClusterView(ClusterConfig("test", "redis://127.0.0.1", "token"), Redis())
    view.redis_state = "ok"
    config = RouterConfig(cluster=view.cluster, model="", ttft_limit_s=limit_s)
    return AdmissionController(config, view, Metrics(), have_tenants=lambda: False)


def test_what_says_something_of_long_waits_does_not_depend_on_what_was_learned() -> None:
    """Else a margin that fell would let shorter waits count, and they would keep it small."""
    controller = gate_of(limit_s=2.0)
    assert asked(controller, 300) is None
    for late in (0.1, 3.0) * 50:  # a wide spread: as much is kept back as may be
        promise = asked(controller, 700)
        assert promise is not None
        controller.note_first_token(Promise(promise.predicted_s, time.monotonic() - late))
    assert asked(controller, 300) is None


def test_guesses_teach_nothing() -> None:
    assert asked(gate_of(limit_s=2.0), 1900, WorkerRates()) is None


async def test_requests_take_turns_until_none_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else later requests without a session would pass those that wait."""
    monkeypatch.setattr(AdmissionController, "has_capacity", lambda self: False)
    gate = gate_of(limit_s=2.0)
    claim = gate.claim(Claim(session="s"), tokens_missing=1, completion_max=1)
    turn = gate.turn(claim)
    waiting = asyncio.ensure_future(turn.__aenter__())
    await asyncio.sleep(0.01)
    gate._turns_until = -math.inf  # the last session was long ago
    assert gate.must_wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not gate.take_turns
