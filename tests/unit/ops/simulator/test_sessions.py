"""Turns of a session stay on the simulated decode worker that has their KV."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tandem.common.perf_model.rates import DecodeRate, PairRate, PrefillRate, WorkerRates
from tandem.ops.simulator.scenario import Scenario, Slo, full_load_factor
from tandem.ops.simulator.traces import Arrival, scale_load
from tandem.router.admission.predict import TtftLimit
from tests.unit.ops.simulator.test_simulation import run

# About those of SmolLM2-135M on a CPU core.
RATES = WorkerRates(
    PrefillRate(10e-3, 0.7e-3, 1e-7), DecodeRate(8e-3, 2e-3), 256, 16 * (22 << 10), measured=True
)
ONE_AND_TWO = Scenario(
    num_prefill=1,
    num_decode=2,
    kv_tokens=64_000,
    rates=RATES,
    pair=PairRate("nixl", 2e-3, 2e9),
    rate_error=0.2,
    report_age_s=0.05,
    sequences_max=16,
    block_size=16,
    slo=Slo(TtftLimit(60.0)),
)


def conversations(seed: int) -> list[Arrival]:
    """40 sessions of 6 turns."""
    rng = Random(seed)
    arrivals = []
    for number in range(40):
        at_s = rng.uniform(0, 100)
        blocks: list[int] = []
        num_tokens = 0
        for turn in range(6):
            num_tokens += rng.randrange(20, 100) if turn else rng.randrange(100, 400)
            while len(blocks) <= num_tokens // 16:
                blocks.append(rng.getrandbits(40))
            output = rng.randrange(16, 48)
            ids = tuple(blocks)
            arrivals.append(
                Arrival(at_s, num_tokens, output, ids, in_session=True, session=f"s{number}")
            )
            num_tokens += output
            at_s += rng.uniform(10, 30)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def share_moved(arrivals: list[Arrival], seed: int, load: float) -> float:
    """Returns the part of the later turns that another decode worker than before got."""
    scenario = replace(ONE_AND_TWO, seed=seed)
    timed = scale_load(arrivals, full_load_factor(scenario, arrivals) * load)
    last: dict[str, str] = {}
    num_moved = num_later = 0
    for request in run(scenario, timed).requests:
        assert request.decode is not None
        worker_id = request.decode.worker_id
        before = last.get(request.arrival.session)
        num_later += before is not None
        num_moved += before not in (None, worker_id)
        last[request.arrival.session] = worker_id
    return num_moved / num_later


@pytest.mark.parametrize("seed", [0, 1])
def test_few_turns_move_at_half_load(seed: int) -> None:
    arrivals = conversations(seed)
    assert share_moved(arrivals, seed, 0.5) <= 0.1
    plain = [replace(arrival, in_session=False) for arrival in arrivals]
    assert share_moved(plain, seed, 0.5) > 0.3
