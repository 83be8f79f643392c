"""The numbers that describe a worker's speed: plain data in the workers' records.

    prefill   step_s per step + token_s per token + token_context_s for each pair of a token and a
              token before it; the step size is the scheduler's token budget
    decode    step_s per step + sequence_s for each sequence in the step
    pull      latency_s + bytes / bytes_per_s

Example: with the defaults, prefill of 1,000 tokens takes 2 steps * 5 ms + 1,000 tokens * 1 ms +
499,500 pairs * 0.1 us = 1.06 s.

The engine fits these numbers to its steps (`step_time.py`), and `predict.py` predicts durations.
The defaults are assumed until something was measured.
"""

from __future__ import annotations

import msgspec

from tandem.common.kv_tiers import DISK, KV_TIERS

# Lines of batches may make a decode step of other sequences longer by this share.
LINES_ITL_SHARE = 0.08


class PrefillRate(msgspec.Struct, frozen=True):
    """The cost of prefill in seconds. The default values are typical of a small model on a CPU."""

    step_s: float = 5e-3
    token_s: float = 1e-3
    token_context_s: float = 1e-7

    def seconds(self, num_tokens: int, context: float = 0, step_tokens: int = 512) -> float:
        """Returns the seconds to prefill `num_tokens` tokens that follow `context` others, in steps
        of `step_tokens` tokens.

        The result does not decrease if there are more tokens, a longer context or smaller steps.
        """
        if num_tokens <= 0:
            return 0.0
        return (
            -(-num_tokens // (step_tokens or 1)) * self.step_s
            + num_tokens * self.token_s
            + num_tokens * (2 * context + num_tokens - 1) / 2 * self.token_context_s
        )

    def stretched(self, times: float) -> PrefillRate:
        """Returns a rate with which each prefill takes `times` times as long."""
        return PrefillRate(*(times * cost for cost in msgspec.structs.astuple(self)))


class DecodeRate(msgspec.Struct, frozen=True):
    """The cost of a decode step in seconds. A decode step computes one token for each sequence."""

    step_s: float = 1e-2
    sequence_s: float = 1e-3

    def seconds(self, num_sequences: float) -> float:
        return self.step_s + self.sequence_s * max(0, num_sequences)

    def num_lines_beside(self, num_sequences: float) -> float:
        """Returns how many lines of batches may be decoded beside `num_sequences` others, so that
        a step becomes longer by at most `LINES_ITL_SHARE`."""
        return LINES_ITL_SHARE * self.seconds(num_sequences) / max(self.sequence_s, 1e-9)


_PULLS_KNOWN = 3


class PairRate(msgspec.Struct, frozen=True):
    """The speed of pulls from one worker to another over one transport."""

    transport: str  # "cuda_ipc", "nixl" or "grpc"
    latency_s: float  # duration of the smallest pull
    bytes_per_s: float
    reason: str = ""  # why a faster transport is not used; empty if this is the fastest one
    # Number of pulls from which `bytes_per_s` was fitted. 0: the rate is assumed, not measured.
    num_pulls: int = 0

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + (num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0)

    @property
    def is_known(self) -> bool:
        """True if enough pulls were measured to show the bandwidth to people."""
        return self.num_pulls >= _PULLS_KNOWN

    @property
    def is_measured(self) -> bool:
        """True if the rate was measured: it differs from the default rate of the transport."""
        guess = default_pair(self.transport)
        return (self.latency_s, self.bytes_per_s) != (guess.latency_s, guess.bytes_per_s)


class WindowBytes(msgspec.Struct, frozen=True):
    """The KV of layers with sliding-window attention. Only the last blocks of a prompt are
    transferred for these layers."""

    num_blocks: int  # number of blocks at a prompt's end that are transferred for these layers
    block_bytes: int  # bytes of one block's KV in these layers


_TIER_BYTES_PER_S = {tier.name: tier.bytes_per_s for tier in KV_TIERS}


class TierRate(msgspec.Struct, frozen=True):
    """The speed of loading blocks from a tier into the KV pool."""

    name: str  # name of one of KV_TIERS
    block_s: float = 0.0  # seconds to load a block; 0: not measured

    def seconds(self, num_blocks: int, block_bytes: int) -> float:
        """Returns the seconds to load blocks. A default speed is used until a load was measured."""
        guess_s = block_bytes / _TIER_BYTES_PER_S.get(self.name, _TIER_BYTES_PER_S[DISK])
        return num_blocks * (self.block_s or guess_s)


class WorkerRates(msgspec.Struct, frozen=True):
    """The rates that a worker's engine measures. They are in the worker's record."""

    prefill: PrefillRate = PrefillRate()
    decode: DecodeRate = DecodeRate()
    step_tokens: int = 512  # largest number of tokens in a step
    block_bytes: int = 0  # bytes of one block's KV in all layers together
    # True: enough steps with prefill were measured. False: the rates are defaults, or fitted to
    # only a few steps, so no request is refused because of them.
    measured: bool = False
    # one entry for each group of layers with sliding-window attention
    windows: tuple[WindowBytes, ...] = ()
    tiers: tuple[TierRate, ...] = ()  # tiers below the KV pool, fastest first
    load_queue_s: float = 0.0  # seconds until all current loads from tiers have ended

    def moved_bytes(self, num_blocks: float) -> float:
        """Returns the bytes to transfer for the last `num_blocks` blocks of a prompt. The number
        need not be whole: 2.5 blocks are two full blocks and half a block.
        """
        num_bytes = num_blocks * self.block_bytes
        for window in self.windows:
            num_bytes -= max(0.0, num_blocks - window.num_blocks) * window.block_bytes
        return num_bytes


DEFAULT_PREFILL = PrefillRate()
DEFAULT_DECODE = DecodeRate()
# Cautious defaults for a pair of workers whose pulls were not measured yet.
DEFAULT_PAIRS = {
    "cuda_ipc": PairRate("cuda_ipc", 1e-3, 2e10),
    "nixl": PairRate("nixl", 2e-3, 1e9),
    "grpc": PairRate("grpc", 4e-3, 3e8),
}


def default_pair(transport: str) -> PairRate:
    """Returns the default rate of a transport. For an unknown transport, this is the rate of gRPC,
    the slower one."""
    return DEFAULT_PAIRS.get(transport, DEFAULT_PAIRS["grpc"])


def token_contexts(num_tokens: int, context: int) -> int:
    """Returns the sum, over `num_tokens` tokens that follow `context` others, of the number of
    tokens before each. Example: 3 tokens after 10 others give 10 + 11 + 12 = 33."""
    return num_tokens * context + num_tokens * (num_tokens - 1) // 2
