"""Computes the results of one run of a simulation."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from tandem.ops.simulator.requests import Request
from tandem.ops.simulator.scenario import Slo
from tandem.ops.simulator.simulation import Simulation


class RunReport(msgspec.Struct, frozen=True):
    """The results of a run.

    The fields `load_tokens`, `load_requests` and `load_busy` measure imbalance among the workers
    that prefill: the largest value of a worker divided by the mean of all. 1.0 is perfect balance.
    """

    policy: str
    load: float  # arrival rate of the run, as a fraction of the rate that the workers can serve
    seed: int
    num_requests: int
    num_served: int
    num_refused: int
    num_lost: int
    num_moved: int
    num_good: int  # number of requests that were served within the SLO
    goodput: float  # num_good / num_requests
    # Fraction of all prompt tokens that the prefilling worker had cached, in its KV pool or in a
    # tier.
    hit_rate: float
    # Tier name -> fraction of all prompt tokens whose KV was loaded from this tier.
    tier_hit_rates: dict[str, float]
    # Tier name -> bytes that all workers together loaded from this tier.
    loaded_bytes: dict[str, float]
    # Fraction of all prompt tokens whose KV was pulled from a worker that had the prefix cached.
    pulled_rate: float
    load_tokens: float  # imbalance of the number of prompt tokens that a worker got
    load_requests: float  # imbalance of the number of requests that a worker got
    load_busy: float  # imbalance of the seconds that a worker spent on prefill
    ttft_s: dict[str, float]  # quantile name (p50, p90, p99) -> seconds
    tpot_s: dict[str, float]


def summarize(simulation: Simulation, policy: str, load: float) -> RunReport:
    """Returns the results of a simulation that has run. `policy` and `load` are copied into the
    report."""
    requests = simulation.requests
    served = [r for r in requests if r.ended_s]
    good = [r for r in served if is_good(r, simulation.scenario.slo)]
    tokens = Counter[str]()
    counts = Counter[str]()
    for request in served:
        if request.prefill is not None:
            tokens[request.prefill.worker_id] += request.arrival.num_tokens
            counts[request.prefill.worker_id] += 1
    has_pool = simulation.scenario.num_prefill > 0
    pool = [w for w in simulation.workers.values() if w.role == "prefill" or not has_pool]
    prompt_tokens = sum(r.arrival.num_tokens for r in served) or 1
    return RunReport(
        policy=policy,
        load=load,
        seed=simulation.scenario.seed,
        num_requests=len(requests),
        num_served=len(served),
        num_refused=sum(r.failure == "refused" for r in requests),
        num_lost=sum(r.failure == "lost" for r in requests),
        num_moved=sum(r.num_migrations > 0 for r in requests),
        num_good=len(good),
        goodput=len(good) / max(1, len(requests)),
        hit_rate=sum(r.cached_tokens for r in served) / prompt_tokens,
        tier_hit_rates={
            tier.name: sum(r.loaded_tokens.get(tier.name, 0) for r in served) / prompt_tokens
            for tier in simulation.scenario.rates.tiers
        },
        loaded_bytes=_loaded_bytes(simulation),
        pulled_rate=sum(r.num_pulled_tokens for r in served) / prompt_tokens,
        load_tokens=_imbalance([tokens[w.worker_id] for w in pool]),
        load_requests=_imbalance([counts[w.worker_id] for w in pool]),
        load_busy=_imbalance([w.engine.prefill_busy_s for w in pool]),
        ttft_s=_quantiles([r.ttft_s for r in served]),
        tpot_s=_quantiles([r.tpot_s for r in served if r.arrival.output_tokens > 1]),
    )


def is_good(request: Request, slo: Slo) -> bool:
    """Returns whether a served request met the SLO's limits on TTFT and TPOT."""
    ttft_max_s = slo.ttft.seconds(request.arrival.num_tokens)
    return request.ttft_s <= ttft_max_s and request.tpot_s <= slo.tpot_s


def _loaded_bytes(simulation: Simulation) -> dict[str, float]:
    num_blocks = Counter[str]()
    for worker in simulation.workers.values():
        if worker.tiers is not None:
            num_blocks.update(worker.tiers.num_loaded())
    block_bytes = simulation.scenario.rates.block_bytes
    return {name: float(count * block_bytes) for name, count in num_blocks.items()}


def _imbalance(shares: Sequence[float]) -> float:
    mean = sum(shares) / len(shares)
    return max(shares) / mean if mean else 1.0


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    quantiles = np.quantile(values, [0.5, 0.9, 0.99]).tolist() if values else [0.0, 0.0, 0.0]
    return dict(zip(("p50", "p90", "p99"), quantiles, strict=True))
