"""Decides whether a prompt's first blocks come sooner from a peer than they are computed. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.common.perf_model import predict
from tandem.common.perf_model.rates import WorkerRates
from tandem.engine.types import SequenceSpec


class ConnectedHolder(predict.Holder, frozen=True):
    """The peer is connected, and is said to have a prompt's first tokens, in whole blocks."""

    worker_id: str
    epoch: str
    address: str


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The plan of a sequence that will await its prefix: the holders to ask, the best first."""

    spec: SequenceSpec
    holders: list[ConnectedHolder]


def holders_worth_asking(
    holders: Iterable[ConnectedHolder],
    *,
    rates: WorkerRates,
    block_size: int,
    num_tokens: int,
    num_cached_blocks: int,
) -> list[ConnectedHolder]:
    """Returns holders with which a prompt of `num_tokens` is there sooner, the fastest first."""
    cached_tokens = num_cached_blocks * block_size
    seconds = {}
    for holder in holders:
        expected = predict.expect(
            rates, num_tokens, cached_tokens, holders=[holder], block_size=block_size
        )
        if expected.pull_s:
            seconds[holder] = expected.total_s
    return sorted(seconds, key=lambda holder: seconds[holder])
