"""Chooses how a prompt's missing blocks come: loaded, pulled from a peer, or computed. Pure.

    held here | computed meanwhile | loaded from tiers | computed after that
              first, as it goes up ^                   end
              held                 `- first            |

A prompt's first blocks cost least to compute, and a load can start at its end. So both ends meet:
blocks are computed from the front while they are loaded from the back, and the rest is computed
after that. Where computing delays other sequences, each second of it counts once more for each.

A chunk cannot be stopped, and a load that came sooner would wait for it: what is computed meanwhile
is expected to take `UNSURE` times as long, and has to be worth `GAIN_MIN` and `GAIN_MIN_S`.

Where another worker would compute the prompt (`Producer`), blocks are pulled from it while it does,
and nothing is delayed here. A tier is left alone if that is the soonest:

    held here, or loaded | pulled from the producer, which has, gets or computes it meanwhile

The worker's engine and the router's prices ask here, so they expect the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tandem.common.perf_model.predict import HERE_MARGIN
from tandem.common.perf_model.rates import PrefillRate

UNSURE = 1.5
GAIN_MIN = 1.1  # times as long the next best choice takes
GAIN_MIN_S = 0.02  # so much longer it takes: a small chunk's time varies by about as much


class Reach(msgspec.Struct, frozen=True):
    """A tier has a prompt's first `num_blocks` blocks, and gives one of them in `block_s`."""

    num_blocks: int
    block_s: float


class Offer(msgspec.Struct, frozen=True):
    """A peer has a prompt's first `num_blocks` blocks, which come over after `latency_s`."""

    num_blocks: int
    latency_s: float
    block_s: float


class Producer(msgspec.Struct, frozen=True):
    """A peer would compute the prompt, begun after `wait_s`, and its blocks would be pulled."""

    rate: PrefillRate
    step_tokens: int
    wait_s: float
    num_blocks: int = 0  # first ones that are there `there_s` later
    there_s: float = 0.0
    block_s: float = 0.0  # to pull a block from there
    given_block_s: float = 0.0  # for the peer to pull a block from here


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
        start = first * self.block_size
        size = self.block_size
        stop = self.num_tokens if end is None else min(end * size, self.num_tokens)
        return self.rate.seconds(stop - start, start, self.step_tokens)


class Choice(msgspec.Struct, frozen=True):
    """Blocks first..end - 1 are loaded; those before are held, or computed meanwhile."""

    first: int
    end: int  # not above `first`: none is loaded
    pulls: bool  # the rest comes from a peer, as far as that has it or computes it
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
    producer: Producer | None = None,
    meets: bool = True,
    pulls_rest: bool = True,
) -> Choice:
    """Returns the choice with the lowest cost. `tiers` come fastest first, `load_queue_s` is until
    a load can start. Without `meets` nothing is computed while blocks are loaded, and without
    `pulls_rest` what comes after loaded blocks is computed."""
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
    """Returns the seconds until all blocks from `held` on have come from the producer. It may pull
    the `held` first ones from here."""

    def compute_s(first: int) -> float:
        start = min(first * prompt.block_size, prompt.num_tokens - 1)
        return producer.rate.seconds(prompt.num_tokens - start, start, producer.step_tokens)

    made_s = producer.there_s + compute_s(producer.num_blocks)
    if held > producer.num_blocks:
        given_s = (held - producer.num_blocks) * producer.given_block_s
        made_s = min(made_s, producer.there_s + given_s + compute_s(held))
    num_missing = max(0.0, prompt.num_tokens / prompt.block_size - held)
    return producer.wait_s + max(made_s, num_missing * producer.block_s)


def load_seconds(tiers: Iterable[Reach], first: int, end: int) -> float:
    """Returns the seconds to load blocks first..end - 1, each from the fastest tier that has it."""
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
    """Returns the block of first..end at which both ends meet soonest: those before it take
    `compute_s`, which grows with it, and those from it on `load_s`, which shrinks."""
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
    tiers: Sequence[Reach]
    queue_s: float

    def seconds(self, first: int, end: int) -> float:
        """Returns the seconds until blocks first..end - 1 are loaded."""
        return self.queue_s + load_seconds(self.tiers, first, end) if first < end else 0.0


def _first_loaded(prompt: Prompt, load: _Load, end: int) -> int:
    """Returns the first block that is loaded, of those before `end`, if others are computed."""

    def compute_s(block: int) -> float:
        return prompt.queue_s + UNSURE * prompt.compute_s(prompt.num_held, block)

    return meeting_block(
        compute_s, lambda block: load.seconds(block, end), prompt.num_held, end - 1
    )


def _after(
    prompt: Prompt, load: _Load, end: int, offer: Offer | None, producer: Producer | None
) -> Iterator[Choice]:
    """Yields the choices to load the blocks before `end`, by what comes after that."""
    yield _with_load(prompt, load, prompt.num_held, end)
    if offer is not None and offer.num_blocks > end:
        yield _with_pull(prompt, load, end, offer)
    if producer is not None:
        load_s = load.seconds(prompt.num_held, end)
        rest_s = produced_s(prompt, producer, end)
        cost_s = load_s + HERE_MARGIN * rest_s
        yield Choice(prompt.num_held, end, True, load_s, load_s + rest_s, cost_s)


def _with_load(prompt: Prompt, load: _Load, first: int, end: int) -> Choice:
    before_s = UNSURE * prompt.compute_s(prompt.num_held, first)
    load_s = load.seconds(first, end)
    there_s = max(prompt.queue_s + before_s, load_s) if first > prompt.num_held else load_s
    rest_s = prompt.compute_s(end)
    seconds = max(prompt.queue_s, there_s) + rest_s
    cost_s = seconds + prompt.num_delayed * (before_s + rest_s)
    if first > prompt.num_held:
        cost_s = max(GAIN_MIN * cost_s, cost_s + GAIN_MIN_S)
    return Choice(first, end, False, there_s, seconds, cost_s)


def _with_pull(prompt: Prompt, load: _Load, end: int, offer: Offer) -> Choice:
    load_s = load.seconds(prompt.num_held, end)
    pull_s = offer.latency_s + (offer.num_blocks - end) * offer.block_s
    rest_s = prompt.compute_s(offer.num_blocks)
    seconds = max(prompt.queue_s, load_s + pull_s) + rest_s
    cost_s = seconds + prompt.num_delayed * rest_s
    return Choice(prompt.num_held, end, True, load_s, seconds, cost_s)
