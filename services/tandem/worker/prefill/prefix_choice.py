"""Whether the first blocks of a prompt come sooner from a peer than they are computed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem import cost_model
from tandem.cost_model import PairRate, WorkerRates, best_start, prefill_seconds
from tandem.engine.types import SequenceSpec


@dataclass(frozen=True, slots=True)
class Holder:
    """A connected peer that is said to have a chain's first blocks, and how fast it is read."""

    worker_id: str
    epoch: str
    address: str
    num_blocks: int
    rate: PairRate


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """For a sequence that will await its prefix: whom to ask, the best first."""

    spec: SequenceSpec
    holders: list[Holder]


def holders_worth_asking(
    holders: Iterable[Holder],
    *,
    rates: WorkerRates,
    block_size: int,
    num_tokens: int,
    num_cached_blocks: int,
) -> list[Holder]:
    """Those with whom a prompt of `num_tokens` is there sooner than without, the fastest first."""
    cached_tokens = num_cached_blocks * block_size
    seconds = {}
    for holder in holders:
        asked = cost_model.Holder(holder.num_blocks * block_size, holder.rate)
        bytes_per_token = rates.block_bytes / block_size
        wait_s, reached = best_start(
            rates, num_tokens, cached_tokens, [asked], bytes_per_token=bytes_per_token
        )
        if reached > cached_tokens:
            seconds[holder] = wait_s + prefill_seconds(rates, num_tokens, reached)
    return sorted(seconds, key=lambda holder: seconds[holder])
