"""The simulated workers, their nominal speed, and the errors that the policy does not know."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import msgspec

from tandem.common.perf_model.predict import prefill_seconds
from tandem.common.perf_model.rates import DecodeRate, PairRate, PrefillRate, TierRate, WorkerRates
from tandem.ops.simulator.traces import BLOCK_SIZE, Arrival, span_s
from tandem.router.admission.predict import TtftLimit

# A guess at an 8B model on one large GPU. `--rates` takes measured ones.
DEFAULT_RATES = WorkerRates(
    prefill=PrefillRate(step_s=8e-3, token_s=5e-5, token_context_s=1e-9),
    decode=DecodeRate(step_s=8e-3, sequence_s=1.5e-4),
    step_tokens=512,
    block_bytes=BLOCK_SIZE * (128 << 10),
    measured=True,
)
KNOWN_IN_STORE = 65_536  # blocks; as services/tandem/engine/tiers/object_store/storage.py
DEFAULT_PAIR = PairRate("nixl", 2e-3, 20e9)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: a worker dies, or comes back with nothing."""

    at_s: float
    worker_id: str
    state: Literal["down", "up"]


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request keeps. A longer prompt may take longer to its first token."""

    ttft: TtftLimit = field(default_factory=lambda: TtftLimit(base_s=2.0, token_s=2e-4))
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Scenario:
    num_decode: int = 8
    num_prefill: int = 0  # none: decode workers prefill themselves
    kv_tokens: int = 3_000_000  # of each worker
    tier_blocks: tuple[int, ...] = ()  # of each worker's tiers, those of `rates`
    tier_policy: str = "value"
    rates: WorkerRates = DEFAULT_RATES  # what the policy is told
    pair: PairRate = DEFAULT_PAIR
    rate_error: float = 0.3  # true rates differ from these by up to this share
    cores: float = 0.0  # of one machine that all workers share; 0: each has its own
    report_age_s: float = 0.5  # how old a worker's load is when the router sees it
    sequences_max: int = 256
    queue_max: int = 256
    pull_prefixes: bool = True
    admission: bool = True  # the router refuses what would come too late
    faults: tuple[Fault, ...] = ()
    slo: Slo = field(default_factory=Slo)
    seed: int = 0
    block_size: int = BLOCK_SIZE

    @property
    def roles(self) -> dict[str, str]:
        """Roles of the workers by worker id."""
        prefill = {f"prefill-{n}": "prefill" for n in range(self.num_prefill)}
        return prefill | {f"decode-{n}": "decode" for n in range(self.num_decode)}

    def true_rates(self, worker_id: str) -> WorkerRates:
        """Returns the true rates: a seed and a name give the same error, whatever the policy."""
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
        """Returns the true rate at which blocks come to the worker."""
        rng = Random(f"{self.seed} pair {worker_id}")
        error = 1 + self.rate_error * rng.uniform(-1, 1)
        return msgspec.structs.replace(
            self.pair,
            latency_s=self.pair.latency_s * error,
            bytes_per_s=self.pair.bytes_per_s / error,
        )


def full_load_factor(scenario: Scenario, arrivals: Sequence[Arrival]) -> float:
    """Returns how many times faster the trace must come to be a load of 100%.

    100% is where the workers would be busy all the time if one cache without limit served them all:
    more than that no policy can carry. A worker that prefills itself is busy with prompts, each
    chunk of which also gives a token to those who decode; what is left of decoding is added.
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
