"""Describes the simulated cluster: the number of workers, their nominal rates, and the difference
between nominal and true rates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import msgspec

from tandem.common.config.transfer import PrefillAt
from tandem.common.perf_model.predict import prefill_seconds
from tandem.common.perf_model.rates import DecodeRate, PairRate, PrefillRate, TierRate, WorkerRates
from tandem.ops.simulator.traces import BLOCK_SIZE, Arrival, span_s
from tandem.router.admission.predict import TtftLimit

# Rates of a worker that are used without `--rates`: a guess for an 8B model on one large GPU.
DEFAULT_RATES = WorkerRates(
    prefill=PrefillRate(step_s=8e-3, token_s=5e-5, token_context_s=1e-9),
    decode=DecodeRate(step_s=8e-3, sequence_s=1.5e-4),
    step_tokens=512,
    block_bytes=BLOCK_SIZE * (128 << 10),
    measured=True,
)
# Number of blocks of the object store that a worker can remember. It equals `REMEMBERED` in
# services/tandem/engine/tiers/object_store/storage.py.
KNOWN_IN_STORE = 65_536
DEFAULT_PAIR = PairRate("nixl", 2e-3, 20e9)


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault. "down": the worker dies. "up": a dead worker restarts with an empty
    cache."""

    at_s: float
    worker_id: str
    state: Literal["down", "up"]


@dataclass(frozen=True, slots=True)
class Slo:
    """The service level objective (SLO): limits on TTFT and TPOT. The limit on TTFT is larger for
    longer prompts."""

    ttft: TtftLimit = field(default_factory=lambda: TtftLimit(base_s=2.0, token_s=2e-4))
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Scenario:
    """The simulated cluster: workers, router options, planned faults and SLO."""

    num_decode: int = 8
    num_prefill: int = 0  # 0: decode workers prefill their prompts themselves
    kv_tokens: int = 3_000_000  # number of tokens that the KV pool of one worker can hold
    # Number of blocks that each tier of one worker can hold, in the order of `rates.tiers`.
    tier_blocks: tuple[int, ...] = ()
    tier_policy: str = "value"
    # Nominal rates, which the placement policy assumes for every worker. The true rates of a worker
    # differ from them by at most the fraction `rate_error`.
    rates: WorkerRates = DEFAULT_RATES
    pair: PairRate = DEFAULT_PAIR
    rate_error: float = 0.3
    # Number of cores that all workers share. 0: each worker has a core of its own.
    cores: float = 0.0
    # Seconds that a worker's report of its load needs to reach the router.
    report_age_s: float = 0.5
    sequences_max: int = 256
    queue_max: int = 256
    pull_prefixes: bool = True
    admission: bool = True  # True: the router refuses requests that would miss the TTFT limit
    faults: tuple[Fault, ...] = ()
    slo: Slo = field(default_factory=Slo)
    # Where prompts are computed, as `--prefill-at` of workers. With "auto", prefill workers also
    # decode.
    prefill_at: PrefillAt = "auto"
    # Target and limit of the time between two tokens, as `--itl-target` and `--itl-limit` of
    # workers. 0: none, so that steps beside decode compute as many prompt tokens as other steps.
    itl_target_s: float = 0.0
    itl_limit_s: float = 0.0
    seed: int = 0
    block_size: int = BLOCK_SIZE

    @property
    def roles(self) -> dict[str, str]:
        """The role of each worker, by worker id."""
        prefill = {f"prefill-{n}": "prefill" for n in range(self.num_prefill)}
        return prefill | {f"decode-{n}": "decode" for n in range(self.num_decode)}

    def true_rates(self, worker_id: str) -> WorkerRates:
        """Returns the true rates of a worker: the nominal rates with random errors. The errors
        depend only on `seed` and the worker id, so all policies are compared on the same
        workers."""
        rng = Random(f"{self.seed} {worker_id}")
        prefill, decode, load = (1 + self.rate_error * rng.uniform(-1, 1) for _ in range(3))
        return msgspec.structs.replace(
            self.rates,
            prefill=self.rates.prefill.stretched(prefill),
            decode=DecodeRate(
                self.rates.decode.step_s * decode, self.rates.decode.sequence_s * decode
            ),
            tiers=tuple(
                TierRate(tier.name, load * tier.seconds(1, self.rates.block_bytes))
                for tier in self.rates.tiers
            ),
        )

    def true_pair(self, worker_id: str) -> PairRate:
        """Returns the true rate at which the worker pulls blocks."""
        rng = Random(f"{self.seed} pair {worker_id}")
        error = 1 + self.rate_error * rng.uniform(-1, 1)
        return msgspec.structs.replace(
            self.pair,
            latency_s=self.pair.latency_s * error,
            bytes_per_s=self.pair.bytes_per_s / error,
        )


def full_load_factor(scenario: Scenario, arrivals: Sequence[Arrival]) -> float:
    """Returns the factor by which the arrivals of a trace must be sped up to give a load of 100%.
    If the workers need 1800 s of work for a trace of 3600 s, the factor is 2.

    The work is computed as if all workers shared one unlimited cache: it is the prefill of tokens
    that are in no earlier prompt, and the decode of all tokens. So no policy can serve more than a
    load of 100%. Without prefill workers, a step that computes a chunk of a prompt also decodes, so
    fewer steps only decode.
    """
    rates = scenario.rates
    seen = set[bytes]()
    prefill_s = 0.0
    chunks = tokens = 0
    for arrival in arrivals:
        hashes = arrival.block_hashes()[: arrival.num_tokens // scenario.block_size]
        depth = next((i for i, h in enumerate(hashes) if h not in seen), len(hashes))
        seen.update(hashes[depth:])
        cached = min(depth * scenario.block_size, arrival.num_tokens - 1)
        prefill_s += prefill_seconds(rates, arrival.num_tokens, cached)
        chunks += math.ceil((arrival.num_tokens - cached) / rates.step_tokens)
        tokens += arrival.output_tokens - 1
    sequence_s = rates.decode.sequence_s * tokens
    if scenario.num_prefill:
        steps_s = rates.decode.step_s * tokens / scenario.sequences_max
        busy = max(prefill_s / scenario.num_prefill, (sequence_s + steps_s) / scenario.num_decode)
    else:
        steps_s = rates.decode.step_s * max(0.0, tokens / scenario.sequences_max - chunks)
        busy = (prefill_s + sequence_s + steps_s) / scenario.num_decode
    if scenario.cores:
        busy = max(busy, (prefill_s + sequence_s + steps_s) / scenario.cores)
    return span_s(arrivals) / busy
