"""Chooses how a prompt's missing blocks are obtained: loaded, pulled or computed. Does no I/O.

    blocks                          how the worker gets them
    before `num_held`               held: they are in the pool
    `num_held` to `first` - 1       computed during the load
    `first` to `end` - 1            loaded from tiers
    from `end` on                   computed after that, or pulled from a peer

Example: a prompt has 10 blocks. Blocks 0 and 1 are in the pool (num_held = 2), and the disk tier
has blocks 0 to 7. The worker may load blocks 4 to 7 (first = 4, end = 8) and compute blocks 2 and 3
meanwhile. It then computes blocks 8 and 9. The first blocks of a prompt are the cheapest to
compute, and a load need not begin with the first missing block. So blocks are computed from the
front while others are loaded from the back.

The choice with the lowest cost in seconds is made. The cost is the time until the prompt is
computed. If computing delays other sequences, each second of it counts once more for each of these
sequences.

A chunk cannot be interrupted, so a load that ends during a chunk must wait for the chunk. Therefore
blocks computed during a load are expected to take `UNSURE` times as long. A choice with such blocks
must be better than others by at least `GAIN_MIN` and `GAIN_MIN_S`.

Another worker may compute the prompt instead (`Producer`). Its blocks are pulled while it computes,
and no local sequence is delayed. The blocks before the pulled ones are held or loaded. Tiers are
not used if the pull alone is the fastest.

The worker's engine and the router's placement both use this module, so they predict the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tandem.common.perf_model.predict import LOCAL_MARGIN
from tandem.common.perf_model.rates import PrefillRate

UNSURE = 1.5
# Blocks are computed during a load only if every other choice costs at least GAIN_MIN times as
# much, and at least GAIN_MIN_S seconds more. The duration of a small chunk varies by GAIN_MIN_S.
GAIN_MIN = 1.1
GAIN_MIN_S = 0.02


class TierReach(msgspec.Struct, frozen=True):
    """A tier that has a prompt's first `num_blocks` blocks. The load of one block takes `block_s`
    seconds."""

    num_blocks: int
    block_s: float


class Offer(msgspec.Struct, frozen=True):
    """A peer that has a prompt's first `num_blocks` blocks. A pull of n blocks takes
    `latency_s` + n * `block_s` seconds."""

    num_blocks: int
    latency_s: float
    block_s: float


class Producer(msgspec.Struct, frozen=True):
    """A peer that could compute the prompt, beginning in `wait_s` seconds. This worker would then
    pull the blocks from the peer."""

    rate: PrefillRate
    step_tokens: int
    wait_s: float
    # The peer has the prompt's first `num_blocks` blocks `there_s` seconds after it has begun. Then
    # it computes the other blocks.
    num_blocks: int = 0
    there_s: float = 0.0
    block_s: float = 0.0  # seconds to pull a block from the peer
    given_block_s: float = 0.0  # seconds for the peer to pull a block from this worker


class Prompt(msgspec.Struct, frozen=True):
    """A prompt whose missing blocks must be obtained, and the speed and queue of the worker that
    needs them."""

    num_tokens: int
    block_size: int
    num_held: int  # number of the prompt's first blocks that are in the pool
    rate: PrefillRate
    step_tokens: int
    queue_s: float = 0.0  # seconds until the worker can begin to compute the prompt
    num_delayed: float = 0.0  # number of other sequences that wait while the prompt is computed

    def compute_s(self, first: int, end: int | None = None) -> float:
        """Returns the seconds to compute blocks first..end - 1, or from `first` to the last token
        if `end` is None."""
        start = first * self.block_size
        size = self.block_size
        stop = self.num_tokens if end is None else min(end * size, self.num_tokens)
        return self.rate.seconds(stop - start, start, self.step_tokens)


class LoadChoice(msgspec.Struct, frozen=True):
    """A way to get the missing blocks: blocks first..end - 1 are loaded. Blocks before `first` are
    held, or computed during the load."""

    first: int
    end: int  # index after the last block to load; at most `first` if no block is loaded
    # True: the blocks from `end` on are pulled from a peer. False: they are computed here.
    pulls: bool
    there_s: float  # seconds until all blocks before `end` are in the pool
    seconds: float  # seconds until the whole prompt is computed
    # `seconds`, plus the seconds that other sequences wait, with a margin for uncertain choices.
    # The choice with the lowest cost is made.
    cost_s: float

    @property
    def loads(self) -> bool:
        """True if blocks are loaded."""
        return self.first < self.end


def choose_soonest(
    prompt: Prompt,
    tiers: Sequence[TierReach] = (),
    *,
    load_queue_s: float = 0.0,
    offer: Offer | None = None,
    producer: Producer | None = None,
    meets: bool = True,
    pulls_rest: bool = True,
) -> LoadChoice:
    """Returns the choice with the lowest cost.

    `tiers` are ordered, fastest first. `load_queue_s` is the time until a load can start. If
    `meets` is False, no block is computed during a load. If `pulls_rest` is False, the blocks after
    loaded ones are never pulled.
    """
    load = _Load(tiers, load_queue_s)
    choices = [*_after(prompt, load, prompt.num_held, offer, producer)]
    for end in {tier.num_blocks for tier in tiers if tier.num_blocks > prompt.num_held}:
        if meets:
            choices.append(_with_load(prompt, load, _first_loaded(prompt, load, end), end))
        if pulls_rest:
            choices += _after(prompt, load, end, offer, producer)
        else:
            choices.append(_with_load(prompt, load, prompt.num_held, end))
    return min(choices, key=lambda each: each.cost_s)


def produced_s(prompt: Prompt, producer: Producer, held: int) -> float:
    """Returns the seconds until all blocks from `held` on have been pulled from the producer.

    The producer may pull the first `held` blocks from this worker instead of computing these
    blocks.
    """

    def compute_s(first: int) -> float:
        start = min(first * prompt.block_size, prompt.num_tokens - 1)
        return producer.rate.seconds(prompt.num_tokens - start, start, producer.step_tokens)

    made_s = producer.there_s + compute_s(producer.num_blocks)
    if held > producer.num_blocks:
        given_s = (held - producer.num_blocks) * producer.given_block_s
        made_s = min(made_s, producer.there_s + given_s + compute_s(held))
    num_missing = max(0.0, prompt.num_tokens / prompt.block_size - held)
    return producer.wait_s + max(made_s, num_missing * producer.block_s)


def load_seconds(tiers: Iterable[TierReach], first: int, end: int) -> float:
    """Returns the seconds to load blocks first..end - 1, each from the fastest tier that has the
    block."""
    seconds = 0.0
    at = first
    for tier in tiers:
        reached = min(end, tier.num_blocks)
        if reached > at:
            seconds += (reached - at) * tier.block_s
            at = reached
    return seconds


def meeting_block(
    compute_s: Callable[[int], float], load_s: Callable[[int], float], first: int, end: int
) -> int:
    """Returns the block b at which computing from the front should meet loading from the back, so
    that both are done soonest.

    Blocks before b are computed in `compute_s(b)` seconds, and blocks from b on are loaded in
    `load_s(b)` seconds, at the same time. The result is the b in first..end for which the longer of
    the two durations is shortest. A larger b must not make compute_s smaller or load_s larger.
    """
    # Most tiers load all blocks before the first one is computed.
    if first < end and compute_s(first + 1) >= load_s(first):
        return first
    low = first
    high = end
    while low < high:
        middle = (low + high) // 2
        if compute_s(middle) >= load_s(middle):
            high = middle
        else:
            low = middle + 1
    before = max(first, low - 1)
    return min((before, low), key=lambda block: max(compute_s(block), load_s(block)))


class _Load(msgspec.Struct, frozen=True):
    tiers: Sequence[TierReach]
    queue_s: float

    def seconds(self, first: int, end: int) -> float:
        """Returns the seconds until blocks first..end - 1 are loaded, the wait for other loads
        included."""
        return self.queue_s + load_seconds(self.tiers, first, end) if first < end else 0.0


def _first_loaded(prompt: Prompt, load: _Load, end: int) -> int:
    """Returns the best first block for a load that ends with block `end` - 1. The missing blocks
    before the first block are computed during the load."""

    def compute_s(block: int) -> float:
        return prompt.queue_s + UNSURE * prompt.compute_s(prompt.num_held, block)

    return meeting_block(
        compute_s, lambda block: load.seconds(block, end), prompt.num_held, end - 1
    )


def _after(
    prompt: Prompt, load: _Load, end: int, offer: Offer | None, producer: Producer | None
) -> Iterator[LoadChoice]:
    """Yields choices that load the blocks from `num_held` to `end` - 1. In the first choice, this
    worker computes the blocks from `end` on. In the others, a peer provides these blocks."""
    yield _with_load(prompt, load, prompt.num_held, end)
    if offer is not None and offer.num_blocks > end:
        yield _with_pull(prompt, load, end, offer)
    if producer is not None:
        load_s = load.seconds(prompt.num_held, end)
        rest_s = produced_s(prompt, producer, end)
        cost_s = load_s + LOCAL_MARGIN * rest_s
        yield LoadChoice(prompt.num_held, end, True, load_s, load_s + rest_s, cost_s)


def _with_load(prompt: Prompt, load: _Load, first: int, end: int) -> LoadChoice:
    before_s = UNSURE * prompt.compute_s(prompt.num_held, first)
    load_s = load.seconds(first, end)
    there_s = max(prompt.queue_s + before_s, load_s) if first > prompt.num_held else load_s
    rest_s = prompt.compute_s(end)
    seconds = max(prompt.queue_s, there_s) + rest_s
    cost_s = seconds + prompt.num_delayed * (before_s + rest_s)
    if first > prompt.num_held:
        cost_s = max(GAIN_MIN * cost_s, cost_s + GAIN_MIN_S)
    return LoadChoice(first, end, False, there_s, seconds, cost_s)


def _with_pull(prompt: Prompt, load: _Load, end: int, offer: Offer) -> LoadChoice:
    load_s = load.seconds(prompt.num_held, end)
    pull_s = offer.latency_s + (offer.num_blocks - end) * offer.block_s
    rest_s = prompt.compute_s(offer.num_blocks)
    seconds = max(prompt.queue_s, load_s + pull_s) + rest_s
    cost_s = seconds + prompt.num_delayed * rest_s
    return LoadChoice(prompt.num_held, end, True, load_s, seconds, cost_s)
