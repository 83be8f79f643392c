from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.cache.layout.rank_heads import RankHeads
from tandem.errors import Incompatible
from tandem.transfer.tensor_parallel import RankRead, rank_reads

NUM_HEADS = 4


def reads_of(
    producer: int, local: int, local_rank: int, num_heads: int = NUM_HEADS
) -> list[RankRead]:
    return rank_reads(
        RankHeads(num_heads, producer), RankHeads(num_heads, local), local_rank=local_rank
    )


def producer_ranks(producer: int, local: int, local_rank: int) -> list[int]:
    return [read.producer_rank for read in reads_of(producer, local, local_rank)]


@st.composite
def degrees(draw: st.DrawFn) -> tuple[int, int, int]:
    """A number of heads, and numbers of ranks that can share them."""
    num_heads = draw(st.integers(1, 16))
    fit = [n for n in range(1, 33) if num_heads % n == 0 or n % num_heads == 0]
    return num_heads, draw(st.sampled_from(fit)), draw(st.sampled_from(fit))


@given(degrees())
def test_every_rank_gets_each_of_its_heads_once(case: tuple[int, int, int]) -> None:
    num_heads, producer, local = case
    held, wanted = RankHeads(num_heads, producer), RankHeads(num_heads, local)
    for rank in range(local):
        found: dict[int, int] = {}
        for read in reads_of(producer, local, rank, num_heads):
            theirs = held.of(read.producer_rank)
            for number in range(read.num_heads):
                assert read.local_head + number not in found, "no head is read twice"
                found[read.local_head + number] = theirs[read.producer_head + number]
        assert [found[number] for number in range(len(found))] == list(wanted.of(rank))


def test_equal_numbers_of_ranks_read_from_the_rank_with_the_same_number() -> None:
    assert reads_of(2, 2, 1) == [RankRead(1, 0, 0, 2)]


def test_fewer_ranks_gather_and_more_ranks_take_their_share() -> None:
    assert reads_of(2, 1, 0) == [RankRead(0, 0, 0, 2), RankRead(1, 0, 2, 2)]
    assert reads_of(2, 4, 3) == [RankRead(1, 1, 0, 1)]


def test_three_ranks_read_what_six_heads_on_two_ranks_share() -> None:
    assert reads_of(2, 3, 1, num_heads=6) == [RankRead(0, 2, 0, 1), RankRead(1, 0, 1, 1)]


def test_replicas_of_a_head_are_read_in_turn() -> None:
    assert [producer_ranks(8, 8, rank) for rank in range(8)] == [[rank] for rank in range(8)]
    assert [producer_ranks(8, 4, rank) for rank in range(4)] == [[0], [3], [4], [7]]
    assert producer_ranks(8, 1, 0) == [0, 2, 4, 6]
    assert [producer_ranks(4, 8, rank) for rank in range(8)] == [
        [r] for r in (0, 0, 1, 1, 2, 2, 3, 3)
    ]


def test_latents_are_on_every_rank_whole_and_are_read_in_turn() -> None:
    for rank in range(3):
        assert reads_of(2, 3, rank, num_heads=1) == [RankRead(rank % 2, 0, 0, 1)]


@pytest.mark.parametrize("producer", [4, 8, 16])
@pytest.mark.parametrize("local", [8, 16])
def test_no_producer_rank_serves_more_consumers_than_another(producer: int, local: int) -> None:
    served = Counter(rank for r in range(local) for rank in producer_ranks(producer, local, r))
    assert set(served.values()) == {max(1, local // producer)}


@pytest.mark.parametrize(("heads", "ranks"), [(4, 3), (6, 4), (3, 2), (4, 6), (4, 0), (4, -1)])
def test_ranks_that_cannot_share_the_heads_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(Incompatible, match=f"tensor_parallel {ranks} does not divide {heads}"):
        RankHeads(heads, ranks)


def test_a_rank_that_is_not_there_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match=r"rank is 2; it must be from 0 to 1"):
        reads_of(1, 2, 2)
