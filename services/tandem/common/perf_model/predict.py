"""This module predicts how long a prompt takes somewhere, for all parts of the cluster. Pure.

    |-- queue, or another wait --|-- pull of a prefix --|-- computing the rest --|

The router's prices and its admission, a decode worker's choice between its peers and itself, a
prefill worker's choice between pulling and computing, and the simulator ask here.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from tandem.common.perf_model.rates import PairRate, WorkerRates, token_contexts

ASK_S = 2e-3  # a lease: opened, answered, released
HERE_MARGIN = 0.95  # of the best peer's time
# A queue may take so many times less than predicted: what is refused early would surely be late.
RATES_OFF = 1.25
OWN_SPARE = 1.05  # times what a prompt is predicted to take that it must have left when it begins


class Holder(msgspec.Struct, frozen=True):
    """A holder is a worker that has the first tokens of a prompt; `rate` is that of its blocks."""

    num_tokens: int
    rate: PairRate


class Prefill(NamedTuple):
    """Prefill that a worker is to do, of one prompt or of several."""

    num_tokens: int
    contexts: int  # the tokens before each of them, summed

    @classmethod
    def of(cls, missing: int, before: int) -> "Prefill":
        """The last `missing` tokens of a prompt, which come after `before` others."""
        return cls(missing, token_contexts(missing, before))

    def seconds(self, rates: WorkerRates) -> float:
        """Predicts how long computing all of it takes; prompts share the steps."""
        if not self.num_tokens:
            return 0.0
        # So many tokens in one piece would have the same sum of contexts behind so many others.
        context = self.contexts / self.num_tokens - (self.num_tokens - 1) / 2
        return rates.prefill.seconds(self.num_tokens, context, rates.step_tokens)


NO_PREFILL = Prefill(0, 0)


def summed(prefills: Iterable[Prefill]) -> Prefill:
    """Returns all of this prefill as one."""
    num_tokens = contexts = 0
    for prefill in prefills:
        num_tokens += prefill.num_tokens
        contexts += prefill.contexts
    return Prefill(num_tokens, contexts)


class Expected(msgspec.Struct, frozen=True):
    """These are the parts of a prompt's time at one worker, in seconds."""

    queue_s: float  # the worker's queue, or a longer wait for something else
    pull_s: float  # of the prefix that a holder has; 0: none is pulled
    compute_s: float  # of the rest
    start: int  # tokens that are not computed

    @property
    def total_s(self) -> float:
        """The sum is the time until the prompt is computed."""
        return self.queue_s + self.pull_s + self.compute_s


def expect(
    rates: WorkerRates,
    num_tokens: int,
    cached_tokens: int,
    *,
    queue_s: float = 0.0,
    after_s: float = 0.0,
    holders: Iterable[Holder] = (),
    block_size: int = 16,
) -> Expected:
    """Predicts a prompt's prefill behind a queue, begun after `after_s` at the earliest.

    The prefix is pulled from the holder with which the prompt is there first, unless computing it
    is as fast.
    """
    if queue_s < after_s:
        queue_s = after_s
    lowest_s = prefill_seconds(rates, num_tokens, cached_tokens)
    best = Expected(queue_s, 0.0, lowest_s, cached_tokens)
    for holder in holders:
        reached, pair = holder.num_tokens, holder.rate
        if reached <= cached_tokens:
            continue
        pulled_bytes = rates.moved_bytes((reached - cached_tokens) / block_size)
        pull_s = ASK_S + pair.latency_s + pulled_bytes / pair.bytes_per_s
        if pull_s >= lowest_s:
            continue
        compute_s = prefill_seconds(rates, num_tokens, reached)
        if pull_s + compute_s < lowest_s:
            best = Expected(queue_s, pull_s, compute_s, reached)
            lowest_s = pull_s + compute_s
    return best


def prefill_seconds(rates: WorkerRates, num_tokens: int, cached_tokens: int) -> float:
    """Computing a prompt takes so long; its last token is never reused, as the next needs it."""
    cached = cached_tokens if cached_tokens < num_tokens else max(0, num_tokens - 1)
    return rates.prefill.seconds(num_tokens - cached, cached, rates.step_tokens)


def queued_seconds(rates: WorkerRates, prompts: Iterable[tuple[int, int]]) -> float:
    """Computing what is missing of several prompts takes so long: each has so many missing tokens
    after so many others."""
    return summed(Prefill.of(*span) for span in prompts).seconds(rates)


def queue_seconds(rates: WorkerRates, queued_tokens: int) -> float:
    """Computing a queue takes so long of which only the tokens are known: as one prompt."""
    return rates.prefill.seconds(queued_tokens, 0, rates.step_tokens)


def token_seconds(rates: WorkerRates) -> float:
    """A prefilled token takes so long, with its share of a full step and without attention."""
    return rates.prefill.token_s + rates.prefill.step_s / rates.step_tokens


def beside_decode(rates: WorkerRates, chunk_tokens: int, num_running: int) -> WorkerRates:
    """Prefill has these rates in chunks of at most `chunk_tokens` (0: a full step), each of which
    also gives a token to every sequence that decodes there."""
    chunk = min(rates.step_tokens, chunk_tokens or rates.step_tokens)
    token_s = rates.prefill.token_s + rates.decode.sequence_s * num_running / chunk
    prefill = msgspec.structs.replace(rates.prefill, token_s=token_s)
    return msgspec.structs.replace(rates, prefill=prefill, step_tokens=chunk)


def is_local_faster(here_s: float, there_s: float) -> bool:
    """A decode worker prefills itself only if that is clearly faster than the best peer, because it
    is there to decode."""
    return here_s < HERE_MARGIN * there_s


def likely_rates(
    told: Iterable[WorkerRates], by: Callable[[WorkerRates], float] = token_seconds
) -> WorkerRates | None:
    """The answer is the rates in the middle of those that were measured; None while none were."""
    known = sorted((rates for rates in told if rates.measured), key=by)
    return known[(len(known) - 1) // 2] if known else None


def believed(told: WorkerRates, likely: WorkerRates | None) -> WorkerRates:
    """A worker is believed to have these rates; without a measurement it is like the others."""
    if told.measured or likely is None:
        return told
    return msgspec.structs.replace(told, prefill=likely.prefill, measured=True)
