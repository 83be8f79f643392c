"""The few numbers that say how fast a worker is: plain data, as workers tell it in their records.

    prefill   step_s a step + token_s a token + token_context_s for each token and each token before
              it, in steps of the scheduler's budget
    decode    step_s a step + sequence_s for each sequence in it
    pull      latency_s + bytes / bytes_per_s

The engine fits them to its steps (`step_time.py`), and `predict.py` answers how long something
would take. Where nothing was measured yet the defaults are a guess.
"""

from __future__ import annotations

import msgspec


class PrefillRate(msgspec.Struct, frozen=True):
    """Seconds that prefill costs. The defaults are a small model on a CPU."""

    step_s: float = 5e-3
    token_s: float = 1e-3
    token_context_s: float = 1e-7

    def seconds(self, num_tokens: int, context: float = 0, step_tokens: int = 512) -> float:
        """Seconds of `num_tokens` tokens that follow `context` others, `step_tokens` a step.

        The answer is never shorter for more tokens, a longer context or a smaller step.
        """
        if num_tokens <= 0:
            return 0.0
        return (
            -(-num_tokens // (step_tokens or 1)) * self.step_s
            + num_tokens * self.token_s
            + num_tokens * (2 * context + num_tokens - 1) / 2 * self.token_context_s
        )

    def stretched(self, times: float) -> PrefillRate:
        """The rate of prefill that takes `times` times as long."""
        return PrefillRate(*(times * cost for cost in msgspec.structs.astuple(self)))


class DecodeRate(msgspec.Struct, frozen=True):
    """Seconds of one decode step: each of its sequences gets one token."""

    step_s: float = 1e-2
    sequence_s: float = 1e-3

    def seconds(self, num_sequences: int) -> float:
        return self.step_s + self.sequence_s * max(0, num_sequences)


class PairRate(msgspec.Struct, frozen=True):
    """Speed of blocks from one worker to another over one transport."""

    transport: str  # "nixl" or "grpc"
    latency_s: float  # of the smallest pull
    bytes_per_s: float
    reason: str = ""  # why it is not the best transport

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + (num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0)

    @property
    def is_measured(self) -> bool:
        """Returns whether it is other than the first guess for its transport."""
        guess = default_pair(self.transport)
        return (self.latency_s, self.bytes_per_s) != (guess.latency_s, guess.bytes_per_s)


class WindowBytes(msgspec.Struct, frozen=True):
    """KV of layers with a window: only the last blocks of a prompt move."""

    num_blocks: int  # at most, of a prompt
    block_bytes: int  # of these layers


_DISK_BYTES_PER_S = 3e8
_TIER_BYTES_PER_S = {"host": 2e9, "disk": _DISK_BYTES_PER_S, "store": 1e8}


class TierRate(msgspec.Struct, frozen=True):
    """Speed of blocks from a tier to the KV pool above it."""

    name: str  # host, disk or store
    block_s: float = 0.0  # to load a block; 0: not measured

    def seconds(self, num_blocks: int, block_bytes: int) -> float:
        """Seconds to load blocks, by a first guess until a load was measured."""
        guess_s = block_bytes / _TIER_BYTES_PER_S.get(self.name, _DISK_BYTES_PER_S)
        return num_blocks * (self.block_s or guess_s)


class WorkerRates(msgspec.Struct, frozen=True):
    """A worker's engine measures these numbers, and its record tells them to all others."""

    prefill: PrefillRate = PrefillRate()
    decode: DecodeRate = DecodeRate()
    step_tokens: int = 512  # token budget of a step
    block_bytes: int = 0  # of one KV block, all layers
    measured: bool = False  # False: the defaults, nothing was seen yet
    windows: tuple[WindowBytes, ...] = ()  # of the layers that have one
    tiers: tuple[TierRate, ...] = ()  # below the KV pool, the fastest first
    load_queue_s: float = 0.0  # until the loads from tiers that are under way have ended

    def moved_bytes(self, num_blocks: float) -> float:
        """Bytes that move for the last `num_blocks` blocks of a prompt, the last one maybe only a
        part; the answer is never smaller for more blocks."""
        num_bytes = num_blocks * self.block_bytes
        for window in self.windows:
            num_bytes -= max(0.0, num_blocks - window.num_blocks) * window.block_bytes
        return num_bytes


DEFAULT_PREFILL = PrefillRate()
DEFAULT_DECODE = DecodeRate()
# First guesses, on the cautious side, until a pair has measured itself.
DEFAULT_PAIRS = {"nixl": PairRate("nixl", 2e-3, 1e9), "grpc": PairRate("grpc", 4e-3, 3e8)}


def default_pair(transport: str) -> PairRate:
    """A pair that has measured nothing gets a guess; an unknown transport gets the slower one."""
    return DEFAULT_PAIRS.get(transport, DEFAULT_PAIRS["grpc"])


def token_contexts(num_tokens: int, context: int) -> int:
    """Tokens before each of `num_tokens` tokens that follow `context` others, summed."""
    return num_tokens * context + num_tokens * (num_tokens - 1) // 2
