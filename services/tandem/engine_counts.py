"""Counts of a worker's engine since the worker started: plain data that travels by msgspec."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from tandem.cached_tokens import CachedTokens

# Upper bounds of the tokens of a step, as vLLM's; the last bucket has none.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineCounts(msgspec.Struct, frozen=True):
    """Counts that only grow. Each prompt counts at the worker that makes its tokens."""

    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_here: int = 0  # prompt tokens whose KV was in the worker's pool
    cached_elsewhere: int = 0  # prompt tokens whose KV a tier or a peer had
    step_tokens: int = 0  # that all steps computed
    steps: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)  # by the tokens that they computed


class EngineTally:
    """Counts for a worker's record."""

    def __init__(self) -> None:
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._cached = CachedTokens()
        self._step_tokens = 0
        self._steps = [0] * (len(STEP_TOKENS) + 1)

    def add_step(self, num_tokens: int) -> None:
        self._step_tokens += num_tokens
        self._steps[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def add_prompt(self, num_tokens: int, cached: CachedTokens) -> None:
        self._prompt_tokens += num_tokens
        self._cached += cached

    def add_preemptions(self, num_preemptions: int) -> None:
        self._num_preemptions += num_preemptions

    @property
    def counts(self) -> EngineCounts:
        """Returns the counts so far."""
        return EngineCounts(
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_here=self._cached.device,
            cached_elsewhere=self._cached.total - self._cached.device,
            step_tokens=self._step_tokens,
            steps=tuple(self._steps),
        )
