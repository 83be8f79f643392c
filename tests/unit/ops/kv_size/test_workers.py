"""The workers of a steady load: what the autoscaler wants for it."""

from __future__ import annotations

import math
from dataclasses import replace

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates
from tandem.ops.kv_size.workers import SteadyLoad, Workers, workers_needed

RATES = WorkerRates(
    prefill=PrefillRate(step_s=0.0, token_s=1e-3, token_context_s=0.0),
    decode=DecodeRate(step_s=0.05, sequence_s=0.001),
    measured=True,
)
LOAD = SteadyLoad(requests_per_s=10.0, prompt_tokens=500, completion_tokens=200)
UTILIZATION = AutoscaleConfig().utilization


def needed(load: SteadyLoad = LOAD, *, worker_blocks: int = 0) -> Workers:
    return workers_needed(load, RATES, itl_s=0.1, block_size=16, worker_blocks=worker_blocks)


def test_each_pool_carries_its_share_of_the_load() -> None:
    found = needed()
    assert found.prompt_s == 0.5
    assert found.prefill == math.ceil(10 * 0.5 / UTILIZATION) == 6
    # 50 sequences fit into a step of 0.1 s: 500 tokens a second.
    assert math.isclose(found.decode_tokens_per_s, 500.0)
    assert found.decode == math.ceil(10 * 200 / 500 / UTILIZATION) == 5
    assert (found.prefill_why, found.decode_why) == ("load", "load")


def test_decode_workers_also_have_room_for_the_sequences() -> None:
    found = needed(worker_blocks=1000)
    assert math.isclose(found.sequences, 10 * 200 * 0.1)
    assert found.sequence_blocks == 44
    blocks = found.sequences * found.sequence_blocks
    assert found.decode == math.ceil(blocks / (1000 * AutoscaleConfig().kv_use_max)) == 11
    assert found.decode_why == "kv"


def test_a_load_of_a_request_an_hour_needs_a_worker_each() -> None:
    found = needed(replace(LOAD, requests_per_s=1 / 3600))
    assert (found.prefill, found.decode) == (1, 1)


def test_ten_times_the_load_needs_ten_times_the_workers() -> None:
    found = needed(replace(LOAD, requests_per_s=100.0))
    assert (found.prefill, found.decode) == (56, 45)
