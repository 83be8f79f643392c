"""Silences: which workers nobody should wait for, by the records that a reader saw."""

from __future__ import annotations

import msgspec
import pytest

from tandem.common.config.cluster import ClusterConfig
from tandem.common.perf_model.rates import PrefillRate, WorkerRates
from tandem.common.worker_load import WorkerLoad
from tandem.net.store.registry import KvCompatibility, WorkerRecord
from tandem.net.store.silence import Silences

CONFIG = ClusterConfig("test", "redis://unused", "token")
COMPATIBILITY = KvCompatibility("model", "float32", "invariant", 16, "float32", "test", 1)


def record(
    num_writes: int, *, step: int = 0, num_leases: int = 0, epoch: str = "a"
) -> WorkerRecord:
    return WorkerRecord(
        worker_id="prefill-0",
        epoch=epoch,
        role="prefill",
        state="ready",
        address="",
        metrics_address="",
        host="",
        pid=1,
        model="",
        max_model_len=100,
        compatibility=COMPATIBILITY,
        load=WorkerLoad(step=step, num_leases=num_leases),
        num_writes=num_writes,
    )


def test_a_worker_that_misses_its_writes_is_silent_until_the_next_one() -> None:
    silences = Silences(CONFIG)
    for now in range(4):
        silences.note([record(7)], float(now))
        assert not silences.is_lost("prefill-0", now)
    silences.note([record(7)], 3.5)
    assert silences.silent_s("prefill-0") == 3.5
    assert silences.is_lost("prefill-0", 3.5)
    silences.note([record(8)], 4.0)
    assert not silences.is_lost("prefill-0", 4.0)


def test_another_process_of_the_same_name_is_heard_anew() -> None:
    silences = Silences(CONFIG)
    silences.note([record(7)], 0.0)
    silences.note([record(7, epoch="b")], 10.0)
    assert not silences.silent_s("prefill-0")


def test_a_worker_that_does_not_number_its_writes_is_never_silent() -> None:
    silences = Silences(CONFIG)
    for now in (0.0, 60.0):
        silences.note([record(0)], now)
    assert not silences.is_lost("prefill-0", 60.0)


@pytest.mark.parametrize(("num_leases", "stuck_s"), [(1, 6.0), (0, 0.0)])
def test_an_engine_that_has_work_and_makes_no_turn_is_stuck(
    num_leases: int, stuck_s: float
) -> None:
    silences = Silences(CONFIG)
    for now in range(7):
        silences.note([record(1 + now, step=5, num_leases=num_leases)], float(now))
    assert silences.stuck_s("prefill-0") == stuck_s
    silences.note([record(9, step=6, num_leases=num_leases)], 8.0)
    assert not silences.stuck_s("prefill-0")


def test_a_long_step_is_no_hang() -> None:
    rates = WorkerRates(prefill=PrefillRate(step_s=4.0), measured=True)
    silences = Silences(CONFIG)
    for now, stuck_s in ((0.0, 0.0), (11.0, 0.0), (20.0, 20.0)):
        busy = record(1 + int(now), step=5, num_leases=1)
        silences.note([_with(busy, rates)], now)
        assert silences.stuck_s("prefill-0") == stuck_s


def test_a_lost_lease_counts_until_the_engine_turns_or_for_a_while() -> None:
    silences = Silences(CONFIG)
    silences.note([record(1, step=5)], 0.0)
    silences.note_lost("prefill-0", 0.0)
    silences.note_lost("nobody", 0.0)
    assert silences.is_lost("prefill-0", 29.0)
    assert not silences.is_lost("prefill-0", 31.0)
    silences.note([record(2, step=6)], 1.0)
    assert not silences.is_lost("prefill-0", 1.0)


def _with(told: WorkerRecord, rates: WorkerRates) -> WorkerRecord:
    return msgspec.structs.replace(told, rates=rates)
