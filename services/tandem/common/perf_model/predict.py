"""Predicts the duration of a prompt's prefill on a worker, for all parts of the cluster. Pure.

    |-- queue, or another wait --|-- pull of a prefix --|-- computing the rest --|
Its users are the router's placement and admission, a decode worker's choice between its peers and
itself, a prefill worker's choice between pulling and computing, and the simulator.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from tandem.common.perf_model.rates import PairRate, WorkerRates, token_contexts

ASK_S = 2e-3  # for a lease: open, answer and release
LOCAL_MARGIN = 0.95  # share of the best peer's time
# Factor by which a queue may be faster than predicted; an early refusal must be certain.
RATES_OFF = 1.25
OWN_SPARE = 1.05  # multiple of its predicted duration that a prompt must have left when it begins


class Holder(msgspec.Struct, frozen=True):
    """A worker that has the first tokens of a prompt. `rate` is that of pulls from it."""

    num_tokens: int
    rate: PairRate


class Prefill(NamedTuple):
    """The prefill work of one prompt or of several."""

    num_tokens: int
    contexts: int  # sum over the tokens of the number of tokens before each

    @classmethod
    def of(cls, missing: int, before: int) -> "Prefill":
        """Returns the work for the last `missing` tokens of a prompt, after `before` others."""
        return cls(missing, token_contexts(missing, before))

    def seconds(self, rates: WorkerRates) -> float:
        """Predicts the seconds to compute all of it; prompts share the steps."""
        if not self.num_tokens:
            return 0.0
        # One piece of this many tokens after `context` others has the same sum of contexts.
        context = self.contexts / self.num_tokens - (self.num_tokens - 1) / 2
        return rates.prefill.seconds(self.num_tokens, context, rates.step_tokens)


NO_PREFILL = Prefill(0, 0)


def summed(prefills: Iterable[Prefill]) -> Prefill:
    """Returns the sum of several prefills as one."""
    num_tokens = contexts = 0
    for prefill in prefills:
        num_tokens += prefill.num_tokens
        contexts += prefill.contexts
    return Prefill(num_tokens, contexts)


class Expected(msgspec.Struct, frozen=True):
    """The parts of a prompt's prefill time on one worker."""

    queue_s: float  # the worker's queue, or a longer wait for something else
    pull_s: float  # to pull the prefix from a holder; 0: none is pulled
    compute_s: float  # to compute the rest
    start: int  # number of tokens that are not computed

    @property
    def total_s(self) -> float:
        """The seconds until the prompt is computed."""
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

    The prefix is pulled from the holder with the earliest result, unless computing it is as fast.
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
        # computing the rest takes no less than its tokens without steps and attention
        if reached <= cached_tokens or (num_tokens - reached) * token_s >= lowest_s:
            continue
        pulled_bytes = rates.moved_bytes((reached - cached_tokens) / block_size)
        pull_s = ASK_S + pair.latency_s + pulled_bytes / pair.bytes_per_s
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
    """Returns the seconds to compute a prompt. Its last token is always computed."""
    cached = cached_tokens if cached_tokens < num_tokens else max(0, num_tokens - 1)
    return rates.prefill.seconds(num_tokens - cached, cached, rates.step_tokens)


def queued_seconds(rates: WorkerRates, prompts: Iterable[tuple[int, int]]) -> float:
    """Returns the seconds to compute several prompts, each (missing tokens, tokens before them)."""
    return summed(Prefill.of(*span) for span in prompts).seconds(rates)


def queue_seconds(rates: WorkerRates, queued_tokens: int) -> float:
    """Returns the seconds to compute a queue of `queued_tokens`, as if it were one prompt."""
    return rates.prefill.seconds(queued_tokens, 0, rates.step_tokens)


def token_seconds(rates: WorkerRates) -> float:
    """Returns the seconds per prefilled token, with its share of a full step, without attention."""
    return rates.prefill.token_s + rates.prefill.step_s / rates.step_tokens


def beside_decode(rates: WorkerRates, chunk_tokens: int, num_running: int) -> WorkerRates:
    """Returns the rates of prefill beside `num_running` decoding sequences.

    Chunks have at most `chunk_tokens` (0: a full step), and each one also computes a token of every
    sequence.
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
    """Returns the median of the measured rates; None if none was measured."""
    known = sorted((rates for rates in reported if rates.measured), key=by)
    return known[(len(known) - 1) // 2] if known else None


def believed(reported: WorkerRates, likely: WorkerRates | None) -> WorkerRates:
    """Returns the rates to assume for a worker: its own if measured, else the likely ones."""
    if reported.measured or likely is None:
        return reported
    return msgspec.structs.replace(reported, prefill=likely.prefill, measured=True)
