"""How long prefill, decode and a pull of blocks take: predictions from a few measured numbers.

    prefill   step_s a step + token_s a token + token_context_s for each token and each token before
              it, in steps of the scheduler's budget
    decode    step_s a step + sequence_s for each sequence in it
    pull      latency_s + bytes / bytes_per_s

Plain data and arithmetic: the engine plans chunks with it, a reader weighs pulling against
computing, and the router places requests. `services/tandem/rate_meters.py` measures the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec


class PrefillRate(msgspec.Struct, frozen=True):
    """Seconds that prefill costs. The defaults are a small model on a CPU."""

    step_s: float = 5e-3
    token_s: float = 1e-3
    token_context_s: float = 1e-7

    def seconds(self, num_tokens: int, context: int = 0, step_tokens: int = 512) -> float:
        """Of `num_tokens` tokens that follow `context` others, at most `step_tokens` a step.

        Never shorter for more tokens, a longer context or a smaller step.
        """
        if num_tokens <= 0:
            return 0.0
        return (
            -(-num_tokens // (step_tokens or 1)) * self.step_s
            + num_tokens * self.token_s
            + num_tokens * (2 * context + num_tokens - 1) / 2 * self.token_context_s
        )


class DecodeRate(msgspec.Struct, frozen=True):
    """Seconds of one decode step: each of its sequences gets one token."""

    step_s: float = 1e-2
    sequence_s: float = 1e-3

    def seconds(self, num_sequences: int) -> float:
        return self.step_s + self.sequence_s * max(0, num_sequences)


class PairRate(msgspec.Struct, frozen=True):
    """How fast blocks come from one worker to another over one transport."""

    transport: str  # "nixl" or "grpc"
    latency_s: float  # of the smallest pull
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + (num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0)


class Holder(msgspec.Struct, frozen=True):
    """Who has the first tokens of a prompt, and how its blocks come to the worker in question."""

    num_tokens: int
    rate: PairRate


class WorkerRates(msgspec.Struct, frozen=True):
    """What a worker tells of its own speed, in its record."""

    prefill: PrefillRate = PrefillRate()
    decode: DecodeRate = DecodeRate()
    step_tokens: int = 512  # token budget of a step
    block_bytes: int = 0  # of one KV block
    measured: bool = False  # False: the defaults, nothing was seen yet


ASK_S = 2e-3  # a lease: opened, answered, released
HERE_MARGIN = 0.95  # of the best peer's time: from there on prefill where it decodes is faster
DEFAULT_PREFILL = PrefillRate()
DEFAULT_DECODE = DecodeRate()
# First guesses, on the cautious side, until a pair has measured itself.
DEFAULT_PAIRS: Mapping[str, PairRate] = MappingProxyType(
    {"nixl": PairRate("nixl", 2e-3, 1e9), "grpc": PairRate("grpc", 4e-3, 3e8)}
)


def default_pair(transport: str) -> PairRate:
    """Of a pair that has measured nothing; the slower guess for a transport without a name."""
    return DEFAULT_PAIRS.get(transport, DEFAULT_PAIRS["grpc"])


def token_contexts(num_tokens: int, context: int) -> int:
    """Tokens before each of `num_tokens` tokens that follow `context` others, summed."""
    return num_tokens * context + num_tokens * (num_tokens - 1) // 2


def best_start(
    rates: WorkerRates,
    num_tokens: int,
    cached_tokens: int,
    holders: Iterable[Holder],
    *,
    bytes_per_token: float,
) -> tuple[float, int]:
    """Seconds to wait for a prefix, and tokens that need no computing then: the fastest way.

    Nothing to wait for and the cached tokens, unless pulling from a holder beats computing.
    """
    wait_s, start, _ = best_prefill(
        rates, num_tokens, cached_tokens, holders, bytes_per_token=bytes_per_token
    )
    return wait_s, start


def best_prefill(
    rates: WorkerRates,
    num_tokens: int,
    cached_tokens: int,
    holders: Iterable[Holder],
    *,
    bytes_per_token: float,
) -> tuple[float, int, float]:
    """`best_start`, and the seconds that computing the rest takes."""
    seconds, step_tokens = rates.prefill.seconds, rates.step_tokens
    lowest_s = prefill_seconds(rates, num_tokens, cached_tokens)
    best = (0.0, cached_tokens, lowest_s)
    for holder in holders:
        reached, rate = holder.num_tokens, holder.rate
        pulled = reached - cached_tokens
        if pulled <= 0:
            continue
        pull_s = ASK_S + rate.latency_s + pulled * bytes_per_token / rate.bytes_per_s
        if pull_s >= lowest_s:
            continue
        missing = num_tokens - reached
        compute_s = (
            seconds(missing, reached, step_tokens)
            if missing > 0
            else prefill_seconds(rates, num_tokens, reached)
        )
        if pull_s + compute_s < lowest_s:
            best, lowest_s = (pull_s, reached, compute_s), pull_s + compute_s
    return best


def prefill_seconds(rates: WorkerRates, num_tokens: int, cached_tokens: int) -> float:
    """Of a prompt; its last token is computed always, for the first new one comes from it."""
    cached = cached_tokens if cached_tokens < num_tokens else max(0, num_tokens - 1)
    return rates.prefill.seconds(num_tokens - cached, cached, rates.step_tokens)
