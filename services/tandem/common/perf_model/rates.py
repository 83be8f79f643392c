"""The numbers that describe a worker's speed: plain data in the workers' records.

    prefill   step_s per step + token_s per token + token_context_s for each pair of a token and a
              token before it, in steps of the scheduler's budget
    decode    step_s per step + sequence_s for each of its sequences
    pull      latency_s + bytes / bytes_per_s
The engine fits them to its steps (`step_time.py`), and `predict.py` predicts durations. The
defaults are assumed while nothing was measured.
"""

from __future__ import annotations

import msgspec

from tandem.common.kv_tiers import DISK, KV_TIERS


class PrefillRate(msgspec.Struct, frozen=True):
    """The cost of prefill in seconds. The defaults are those of a small model on a CPU."""

    step_s: float = 5e-3
    token_s: float = 1e-3
    token_context_s: float = 1e-7

    def seconds(self, num_tokens: int, context: float = 0, step_tokens: int = 512) -> float:
        """Returns the seconds for `num_tokens` tokens after `context` others, `step_tokens` per
        step.

        The result never falls with more tokens, a longer context or a smaller step.
        """
        if num_tokens <= 0:
            return 0.0
        return (
            -(-num_tokens // (step_tokens or 1)) * self.step_s
            + num_tokens * self.token_s
            + num_tokens * (2 * context + num_tokens - 1) / 2 * self.token_context_s
        )

    def stretched(self, times: float) -> PrefillRate:
        """Returns the rate of prefill that takes `times` times as long."""
        return PrefillRate(*(times * cost for cost in msgspec.structs.astuple(self)))


class DecodeRate(msgspec.Struct, frozen=True):
    """The cost of a decode step in seconds. Each of its sequences gets one token."""

    step_s: float = 1e-2
    sequence_s: float = 1e-3

    def seconds(self, num_sequences: int) -> float:
        return self.step_s + self.sequence_s * max(0, num_sequences)


class PairRate(msgspec.Struct, frozen=True):
    """The speed of pulls from one worker to another over one transport."""

    transport: str  # "nixl" or "grpc"
    latency_s: float  # duration of the smallest pull
    bytes_per_s: float
    reason: str = ""  # reason why it is not the best transport

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + (num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0)

    @property
    def is_measured(self) -> bool:
        """True if it differs from the default for its transport."""
        guess = default_pair(self.transport)
        return (self.latency_s, self.bytes_per_s) != (guess.latency_s, guess.bytes_per_s)


class WindowBytes(msgspec.Struct, frozen=True):
    """The KV of layers with a window, of which only the last blocks of a prompt are transferred."""

    num_blocks: int  # most blocks of a prompt
    block_bytes: int  # size in these layers


_TIER_BYTES_PER_S = {tier.name: tier.bytes_per_s for tier in KV_TIERS}


class TierRate(msgspec.Struct, frozen=True):
    """The speed of loading blocks from a tier into the KV pool."""

    name: str  # of one of KV_TIERS
    block_s: float = 0.0  # time to load a block; 0: not measured

    def seconds(self, num_blocks: int, block_bytes: int) -> float:
        """Returns the seconds to load blocks, by a default until a load was measured."""
        guess_s = block_bytes / _TIER_BYTES_PER_S.get(self.name, _TIER_BYTES_PER_S[DISK])
        return num_blocks * (self.block_s or guess_s)


class WorkerRates(msgspec.Struct, frozen=True):
    """The rates that a worker's engine measures. They are in the worker's record."""

    prefill: PrefillRate = PrefillRate()
    decode: DecodeRate = DecodeRate()
    step_tokens: int = 512  # token budget of a step
    block_bytes: int = 0  # size of one KV block over all layers
    measured: bool = False  # False: default rates, nothing was measured
    windows: tuple[WindowBytes, ...] = ()  # for layers with a window
    tiers: tuple[TierRate, ...] = ()  # tiers below the KV pool, fastest first
    load_queue_s: float = 0.0  # until the current loads from tiers have ended

    def moved_bytes(self, num_blocks: float) -> float:
        """Returns the bytes to transfer for the last `num_blocks` blocks of a prompt.

        The last block may be partial. The result never falls with more blocks.
        """
        num_bytes = num_blocks * self.block_bytes
        for window in self.windows:
            num_bytes -= max(0.0, num_blocks - window.num_blocks) * window.block_bytes
        return num_bytes


DEFAULT_PREFILL = PrefillRate()
DEFAULT_DECODE = DecodeRate()
# Cautious defaults until a pair is measured.
DEFAULT_PAIRS = {"nixl": PairRate("nixl", 2e-3, 1e9), "grpc": PairRate("grpc", 4e-3, 3e8)}


def default_pair(transport: str) -> PairRate:
    """Returns the default rate of a pair; an unknown transport gets the slower one."""
    return DEFAULT_PAIRS.get(transport, DEFAULT_PAIRS["grpc"])


def token_contexts(num_tokens: int, context: int) -> int:
    """Returns the number of tokens before each of `num_tokens` tokens after `context` others,
    summed.
    """
    return num_tokens * context + num_tokens * (num_tokens - 1) // 2
