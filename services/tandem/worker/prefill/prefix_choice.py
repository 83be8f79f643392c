"""Decides whether pulling a prompt's first blocks is faster than computing them. Does no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.common.perf_model import predict
from tandem.common.perf_model.rates import WorkerRates
from tandem.engine.types import SequenceSpec


class ConnectedHolder(predict.Holder, frozen=True, kw_only=True):
    """A connected peer that should have the KV of a prompt's first `num_tokens` tokens, in its pool
    or its tiers."""

    worker_id: str
    epoch: str
    address: str


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The plan for a sequence whose prefix is pulled before the rest of the prompt is computed.

    `holders` are sorted, the fastest first.
    """

    spec: SequenceSpec
    holders: list[ConnectedHolder]


def holders_worth_using(
    holders: Iterable[ConnectedHolder],
    *,
    rates: WorkerRates,
    block_size: int,
    num_tokens: int,
    num_cached_blocks: int,
) -> list[ConnectedHolder]:
    """Returns the holders from which it is faster to pull the prefix than to compute it.

    The fastest is first. `num_tokens` is the length of the prompt.
    """
    cached_tokens = num_cached_blocks * block_size
    seconds = {}
    for holder in holders:
        expected = predict.expect(
            rates, num_tokens, cached_tokens, holders=[holder], block_size=block_size
        )
        if expected.pull_s:
            seconds[holder] = expected.total_s
    return sorted(seconds, key=lambda holder: seconds[holder])
