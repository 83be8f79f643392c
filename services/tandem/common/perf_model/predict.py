"""Predicts the duration of a prompt's prefill on a worker. Does no I/O.

    |-- queue, or another wait --|-- pull of a prefix --|-- computing the tokens after it --|

The module is used by

- the router's placement and admission
- a decode worker, which chooses between its peers and itself
- a prefill worker, which chooses between pulling and computing
- the simulator
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from tandem.common.perf_model.rates import PairRate, WorkerRates, token_contexts

ASK_S = 2e-3  # seconds that the messages of a lease take: to open, to answer and to release it
# A decode worker prefills a prompt itself if this takes less than 0.95 times as long as the best
# peer would take.
LOCAL_MARGIN = 0.95
# Prefill may be up to 1.25 times as fast as predicted. An arriving request is refused only if its
# first token would be late even with this speed.
RATES_OFF = 1.25
# A waiting prompt whose prefill is predicted to take 2 s is refused when less than 1.05 * 2 s are
# left until the deadline of its first token.
OWN_SPARE = 1.05


class Holder(msgspec.Struct, frozen=True):
    """A worker that has the KV of a prompt's first `num_tokens` tokens. `rate` is the speed of
    pulls from this worker. Before a pull, the worker loads the KV that only its tiers have, which
    takes `load_s` seconds."""

    num_tokens: int
    rate: PairRate
    load_s: float = 0.0


class Prefill(NamedTuple):
    """The prefill work of one prompt or of several."""

    num_tokens: int
    # Sum, over the tokens to compute, of the number of tokens before each: 0 + 1 + 2 for three
    # tokens at the start of a prompt.
    contexts: int

    @classmethod
    def of(cls, missing: int, before: int) -> "Prefill":
        """Returns the work for `missing` tokens of a prompt that follow `before` other tokens."""
        return cls(missing, token_contexts(missing, before))

    def seconds(self, rates: WorkerRates) -> float:
        """Predicts the seconds to compute all tokens. A step may have tokens of several prompts."""
        if not self.num_tokens:
            return 0.0
        # All tokens are treated as the tokens of one prompt. The number of tokens before them is
        # chosen so that the sum `contexts` stays the same.
        context = self.contexts / self.num_tokens - (self.num_tokens - 1) / 2
        return rates.prefill.seconds(self.num_tokens, context, rates.step_tokens)


NO_PREFILL = Prefill(0, 0)


def summed(prefills: Iterable[Prefill]) -> Prefill:
    """Returns the sum of several prefills as one prefill."""
    num_tokens = contexts = 0
    for prefill in prefills:
        num_tokens += prefill.num_tokens
        contexts += prefill.contexts
    return Prefill(num_tokens, contexts)


class Expected(msgspec.Struct, frozen=True):
    """The predicted prefill time of a prompt on one worker, in three parts."""

    queue_s: float  # seconds until the prompt's prefill starts
    # Seconds to pull the prefix from a holder, which may load it first. 0: no prefix is pulled.
    pull_s: float
    compute_s: float  # seconds to compute the tokens from number `start` to the end of the prompt
    start: int  # number of tokens at the start of the prompt that are cached or pulled

    @property
    def total_s(self) -> float:
        """The seconds until the prompt is computed: the sum of all parts."""
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
    """Predicts the prefill of a prompt. The prefill starts after `queue_s` or after `after_s`,
    whichever is later.

    The prefix is pulled from the holder with which the prefill ends soonest. The prefix is not
    pulled if the prefill would end as soon without a pull.
    """
    if queue_s < after_s:
        queue_s = after_s
    lowest_s = best_compute_s = prefill_seconds(rates, num_tokens, cached_tokens)
    best_pull_s = 0.0
    start = cached_tokens
    token_s = rates.prefill.token_s
    for holder in holders:
        reached = holder.num_tokens
        pair = holder.rate
        # Each token that this holder does not have takes at least `token_s` to compute. The holder
        # is skipped if these tokens alone take as long as the best choice so far.
        if reached <= cached_tokens or (num_tokens - reached) * token_s >= lowest_s:
            continue
        pulled_bytes = rates.moved_bytes((reached - cached_tokens) / block_size)
        pull_s = ASK_S + pair.latency_s + holder.load_s + pulled_bytes / pair.bytes_per_s
        if pull_s >= lowest_s:
            continue
        compute_s = prefill_seconds(rates, num_tokens, reached)
        if pull_s + compute_s < lowest_s:
            lowest_s = pull_s + compute_s
            best_pull_s = pull_s
            best_compute_s = compute_s
            start = reached
    return Expected(queue_s, best_pull_s, best_compute_s, start)


def prefill_seconds(rates: WorkerRates, num_tokens: int, cached_tokens: int) -> float:
    """Returns the seconds to compute the tokens of a prompt that are not cached. The last token is
    always computed."""
    cached = cached_tokens if cached_tokens < num_tokens else max(0, num_tokens - 1)
    return rates.prefill.seconds(num_tokens - cached, cached, rates.step_tokens)


def queued_seconds(rates: WorkerRates, prompts: Iterable[tuple[int, int]]) -> float:
    """Returns the seconds to compute several prompts. `prompts` has (number of missing tokens,
    number of tokens before them) for each."""
    return summed(Prefill.of(*span) for span in prompts).seconds(rates)


def queue_seconds(rates: WorkerRates, queued_tokens: int) -> float:
    """Returns the seconds to compute a queue of `queued_tokens`, as if it were one prompt."""
    return rates.prefill.seconds(queued_tokens, 0, rates.step_tokens)


def token_seconds(rates: WorkerRates) -> float:
    """Returns the seconds to prefill one token as a part of a full step, without attention."""
    return rates.prefill.token_s + rates.prefill.step_s / rates.step_tokens


def beside_decode(rates: WorkerRates, chunk_tokens: int, num_running: int) -> WorkerRates:
    """Returns the rates of prefill on a worker that also decodes `num_running` sequences.

    A step then has a chunk of at most `chunk_tokens` tokens (0: a full step) and one token of every
    decoding sequence. The time of the decoding sequences' tokens is spread over the tokens of the
    chunk, so the returned `token_s` is larger.
    """
    chunk = min(rates.step_tokens, chunk_tokens or rates.step_tokens)
    token_s = rates.prefill.token_s + rates.decode.sequence_s * num_running / chunk
    prefill = msgspec.structs.replace(rates.prefill, token_s=token_s)
    return msgspec.structs.replace(rates, prefill=prefill, step_tokens=chunk)


def is_local_faster(local_s: float, remote_s: float) -> bool:
    """Returns whether prefill on the decode worker is clearly faster than on the best peer.

    A small advantage is not enough, because the decode worker should stay free to decode.
    """
    return local_s < LOCAL_MARGIN * remote_s


def likely_rates(
    reported: Iterable[WorkerRates], by: Callable[[WorkerRates], float] = token_seconds
) -> WorkerRates | None:
    """Returns the median of the measured rates, in the order of `by`. Returns None if no rates were
    measured."""
    known = sorted((rates for rates in reported if rates.measured), key=by)
    return known[(len(known) - 1) // 2] if known else None


def believed(reported: WorkerRates, likely: WorkerRates | None) -> WorkerRates:
    """Returns the rates to assume for a worker: its own rates if they were measured, otherwise the
    `likely` ones."""
    if reported.measured or likely is None:
        return reported
    return msgspec.structs.replace(reported, prefill=likely.prefill, measured=True)
