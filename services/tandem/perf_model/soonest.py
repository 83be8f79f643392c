"""Chooses how a prompt's missing blocks come: loaded, pulled from a peer, or computed. Pure.

    held here | computed meanwhile | loaded from tiers | computed after that
              first, as it goes up ^                   end
              held                 `- first            |

A prompt's first blocks cost least to compute, and a load can start at its end. So both ends meet:
blocks are computed from the front while they are loaded from the back, and the rest is computed
after that. Where computing delays other sequences, each second of it counts once more for each.

A chunk cannot be stopped, and a load that came sooner would wait for it: what is computed meanwhile
is expected to take `UNSURE` times as long, and has to be worth `GAIN_MIN`.

The worker's engine and the router's prices ask here, so they expect the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tandem.perf_model.rates import PrefillRate

UNSURE = 1.5
GAIN_MIN = 1.1  # times as long the next best choice takes


class Reach(msgspec.Struct, frozen=True):
    """A tier has a prompt's first `num_blocks` blocks, and gives one of them in `block_s`."""

    num_blocks: int
    block_s: float


class Offer(msgspec.Struct, frozen=True):
    """A peer has a prompt's first `num_blocks` blocks, which come over after `latency_s`."""

    num_blocks: int
    latency_s: float
    block_s: float


class Prompt(msgspec.Struct, frozen=True):
    """A prompt, and the worker that is to compute what is missing of it."""

    num_tokens: int
    block_size: int
    num_held: int  # first blocks, in the pool
    rate: PrefillRate
    step_tokens: int
    queue_s: float = 0.0  # until its computing can start
    num_delayed: float = 0.0  # sequences that its computing delays

    def compute_s(self, first: int, end: int | None = None) -> float:
        """Returns the seconds to compute blocks first..end - 1; by default to the last token."""
        start, size = first * self.block_size, self.block_size
        stop = self.num_tokens if end is None else min(end * size, self.num_tokens)
        return self.rate.seconds(stop - start, start, self.step_tokens)


class Choice(msgspec.Struct, frozen=True):
    """Blocks first..end - 1 are loaded; those before are held, or computed meanwhile."""

    first: int
    end: int  # not above `first`: none is loaded
    pulls: bool  # the rest comes from a peer, as far as it goes
    there_s: float  # until the blocks before `end` are here
    seconds: float  # until the whole prompt is computed
    cost_s: float  # with the delay of others

    @property
    def loads(self) -> bool:
        """True if something is loaded."""
        return self.first < self.end


def choose_soonest(
    prompt: Prompt,
    tiers: Sequence[Reach] = (),
    *,
    load_queue_s: float = 0.0,
    offer: Offer | None = None,
    meets: bool = True,
) -> Choice:
    """Returns the choice with the lowest cost. `tiers` come fastest first, `load_queue_s` is until
    a load can start. Without `meets` nothing is computed while blocks are loaded."""
    return min(_choices(prompt, tiers, load_queue_s, offer, meets), key=lambda each: each.cost_s)


def load_seconds(tiers: Iterable[Reach], first: int, end: int) -> float:
    """Returns the seconds to load blocks first..end - 1, each from the fastest tier that has it."""
    seconds, at = 0.0, first
    for tier in tiers:
        reached = min(end, tier.num_blocks)
        if reached > at:
            seconds += (reached - at) * tier.block_s
            at = reached
    return seconds


def meeting_block(
    compute_s: Callable[[int], float], load_s: Callable[[int], float], first: int, end: int
) -> int:
    """Returns the block of first..end at which both ends meet soonest: those before it take
    `compute_s`, which grows with it, and those from it on `load_s`, which shrinks."""
    low, high = first, end
    while low < high:
        middle = (low + high) // 2
        if compute_s(middle) >= load_s(middle):
            high = middle
        else:
            low = middle + 1
    before = max(first, low - 1)
    return min((before, low), key=lambda block: max(compute_s(block), load_s(block)))


def _choices(
    prompt: Prompt,
    tiers: Sequence[Reach],
    load_queue_s: float,
    offer: Offer | None,
    meets: bool,
) -> Iterator[Choice]:
    held = prompt.num_held
    yield _without_load(prompt, offer=None)
    if offer is not None and offer.num_blocks > held:
        yield _without_load(prompt, offer=offer)
    for end in {tier.num_blocks for tier in tiers}:
        if end <= held:
            continue
        firsts = {held}
        if meets:

            def compute_s(block: int) -> float:
                return prompt.queue_s + UNSURE * prompt.compute_s(held, block)

            def load_s(block: int, end: int = end) -> float:
                return load_queue_s + load_seconds(tiers, block, end)

            firsts.add(meeting_block(compute_s, load_s, held, end - 1))
        for first in firsts:
            yield _with_load(prompt, tiers, first, end, load_queue_s)
        if offer is not None and offer.num_blocks > end:
            yield _load_and_pull(prompt, tiers, end, load_queue_s, offer)


def _without_load(prompt: Prompt, offer: Offer | None) -> Choice:
    held = prompt.num_held
    reached = held if offer is None else offer.num_blocks
    pull_s = 0.0 if offer is None else offer.latency_s + (reached - held) * offer.block_s
    rest_s = prompt.compute_s(reached)
    seconds = max(prompt.queue_s, pull_s) + rest_s
    cost_s = seconds + prompt.num_delayed * rest_s
    return Choice(held, held, offer is not None, 0.0, seconds, cost_s)


def _with_load(
    prompt: Prompt, tiers: Sequence[Reach], first: int, end: int, load_queue_s: float
) -> Choice:
    before_s = UNSURE * prompt.compute_s(prompt.num_held, first)
    load_s = load_queue_s + load_seconds(tiers, first, end)
    there_s = max(prompt.queue_s + before_s, load_s) if first > prompt.num_held else load_s
    rest_s = prompt.compute_s(end)
    seconds = max(prompt.queue_s, there_s) + rest_s
    cost_s = seconds + prompt.num_delayed * (before_s + rest_s)
    if first > prompt.num_held:
        cost_s *= GAIN_MIN
    return Choice(first, end, False, there_s, seconds, cost_s)


def _load_and_pull(
    prompt: Prompt, tiers: Sequence[Reach], end: int, load_queue_s: float, offer: Offer
) -> Choice:
    load_s = load_queue_s + load_seconds(tiers, prompt.num_held, end)
    pull_s = offer.latency_s + (offer.num_blocks - end) * offer.block_s
    rest_s = prompt.compute_s(offer.num_blocks)
    seconds = max(prompt.queue_s, load_s + pull_s) + rest_s
    cost_s = seconds + prompt.num_delayed * rest_s
    return Choice(prompt.num_held, end, True, load_s, seconds, cost_s)
