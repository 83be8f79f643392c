from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.dtypes import RotatedKey
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.errors import Incompatible
from tandem.transfer.tensor_parallel import (
    BlockPairs,
    ParallelLayout,
    RankRead,
    ShardPart,
    descriptors,
)
from tests.harness.tensor_parallel_ranks import expected_pools, rank_pools, whole_model

WHOLE = BlockLayout(6, 4, 2, 2, 3, "bfloat16")  # a head of a block: 48 bytes
HEAD_BYTES = 48
DEGREES = range(1, 9)


def layout(degree: int, **fields: Any) -> ParallelLayout:
    return ParallelLayout(replace(WHOLE, **fields), degree)


def divides(heads: int, degree: int) -> bool:
    return heads % degree == 0 or degree % heads == 0


def producer_ranks(producer: int, local: int, local_rank: int) -> list[int]:
    reads = descriptors(
        layout(producer), layout(local), BlockPairs([0], [0]), local_rank=local_rank
    )
    return [read.producer_rank for read in reads]


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    """Layouts of heads, and of latent attention: one head without values, in which rotated keys are
    apart if it is quantized."""
    dtype = draw(st.sampled_from(["bfloat16", "int8"]))
    whole = replace(WHOLE, num_layers=draw(st.integers(1, 3)), dtype=dtype)
    if draw(st.booleans()):
        return replace(whole, num_kv_heads=draw(st.integers(1, 16)))
    latent = replace(whole, num_kv_heads=1, head_dim=24, has_values=False)
    if dtype == "bfloat16":
        return latent
    rotated = RotatedKey(
        draw(st.sampled_from([4, 8])), draw(st.sampled_from(["bfloat16", "float32"]))
    )
    return replace(latent, rotated=rotated)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ParallelLayout, ParallelLayout, BlockPairs]:
    whole = draw(layouts())
    fit = [degree for degree in DEGREES if divides(whole.num_kv_heads, degree)]
    degrees = st.sampled_from(fit)
    producer = ParallelLayout(replace(whole, num_blocks=draw(st.integers(1, 9))), draw(degrees))
    local = ParallelLayout(replace(whole, num_blocks=draw(st.integers(1, 9))), draw(degrees))
    local_ids = draw(st.lists(st.integers(0, local.whole.num_blocks - 1), unique=True))
    producer_id = st.integers(0, producer.whole.num_blocks - 1)
    producer_ids = draw(st.lists(producer_id, min_size=len(local_ids), max_size=len(local_ids)))
    return producer, local, BlockPairs(producer_ids, local_ids)


@given(cases())
def test_every_rank_gets_its_heads_and_nothing_else(
    case: tuple[ParallelLayout, ParallelLayout, BlockPairs],
) -> None:
    producer, local, blocks = case
    whole = whole_model(1, producer.whole)
    producer_pools = rank_pools(whole, producer)
    for rank, expected in enumerate(expected_pools(whole, local, blocks)):
        pool = np.zeros(local.rank_layout.pool_bytes, np.uint8)
        written = np.zeros(pool.shape, bool)
        for read in descriptors(producer, local, blocks, local_rank=rank):
            for part in read.parts:
                into = slice(part.local_offset, part.local_offset + part.num_bytes)
                start = part.producer_offset
                assert not written[into].any()  # no byte travels twice
                written[into] = True
                pool[into] = producer_pools[read.producer_rank][start : start + part.num_bytes]
        assert np.array_equal(pool, expected)
        assert written.sum() == len(blocks.local_ids) * local.rank_layout.block_bytes


def test_equal_degrees_read_their_own_rank_in_runs_of_blocks() -> None:
    blocks = BlockPairs([3, 4, 0], [1, 2, 3])
    block = 2 * HEAD_BYTES
    assert descriptors(layout(2), layout(2), blocks, local_rank=1) == [
        RankRead(1, (ShardPart(3 * block, block, 2 * block), ShardPart(0, 3 * block, block)))
    ]


def test_a_smaller_degree_gathers_and_a_larger_one_takes_its_share() -> None:
    blocks = BlockPairs([5], [2])
    assert descriptors(layout(2), layout(1), blocks, local_rank=0) == [
        RankRead(0, (ShardPart(5 * 96, 2 * 192, 96),)),
        RankRead(1, (ShardPart(5 * 96, 2 * 192 + 96, 96),)),
    ]
    assert descriptors(layout(2), layout(4), blocks, local_rank=3) == [
        RankRead(1, (ShardPart(5 * 96 + 48, 2 * 48, 48),))
    ]


def test_three_ranks_read_what_six_heads_on_two_ranks_share() -> None:
    two, three = layout(2, num_kv_heads=6), layout(3, num_kv_heads=6)
    reads = descriptors(two, three, BlockPairs([0], [0]), local_rank=1)
    assert reads == [
        RankRead(0, (ShardPart(2 * HEAD_BYTES, 0, HEAD_BYTES),)),
        RankRead(1, (ShardPart(0, HEAD_BYTES, HEAD_BYTES),)),
    ]


def test_replicas_of_a_head_are_read_in_turn() -> None:
    assert [producer_ranks(8, 8, rank) for rank in range(8)] == [[rank] for rank in range(8)]
    assert [producer_ranks(8, 4, rank) for rank in range(4)] == [[0], [3], [4], [7]]
    assert producer_ranks(8, 1, 0) == [0, 2, 4, 6]
    assert [producer_ranks(4, 8, rank) for rank in range(8)] == [
        [r] for r in (0, 0, 1, 1, 2, 2, 3, 3)
    ]


@pytest.mark.parametrize("rotated", [None, RotatedKey(4, "bfloat16")])
def test_latents_are_on_every_rank_whole_and_are_read_in_turn(rotated: RotatedKey | None) -> None:
    """A token of a layer has 24 numbers of 2 bytes; or 20 of 1 byte, 4 of 2 bytes and a scale."""
    fields: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 24, "has_values": False}
    fields |= {"rotated": rotated, "dtype": "int8" if rotated else "bfloat16"}
    block_bytes = 2 * (64 if rotated else 2 * 24 * 2)  # 2 layers; a part of 2 x 30 bytes is padded
    two, three = layout(2, **fields), layout(3, **fields)
    for rank in range(3):
        reads = descriptors(two, three, BlockPairs([5, 1, 2], [0, 3, 4]), local_rank=rank)
        assert reads == [
            RankRead(
                rank % 2,
                (
                    ShardPart(5 * block_bytes, 0, block_bytes),
                    ShardPart(block_bytes, 3 * block_bytes, 2 * block_bytes),
                ),
            )
        ]


@pytest.mark.parametrize("producer", [4, 8, 16])
@pytest.mark.parametrize("local", [8, 16])
def test_no_producer_rank_serves_more_consumers_than_another(producer: int, local: int) -> None:
    served = Counter(rank for r in range(local) for rank in producer_ranks(producer, local, r))
    assert set(served.values()) == {max(1, local // producer)}


@pytest.mark.parametrize(("heads", "degree"), [(4, 3), (6, 4), (3, 2), (4, 6), (4, 0), (4, -1)])
def test_a_degree_that_does_not_divide_is_refused(heads: int, degree: int) -> None:
    with pytest.raises(Incompatible, match=f"tensor_parallel {degree} does not divide {heads}"):
        layout(degree, num_kv_heads=heads)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("num_kv_heads", 8, "num_kv_heads is 8, not 4"),
        ("num_layers", 3, "num_layers is 3, not 2"),
        ("block_size", 4, "block_size is 4, not 2"),
        ("head_dim", 6, "head_dim is 6, not 3"),
        ("dtype", "float32", "dtype is 'float32', not 'bfloat16'"),
        ("has_values", False, "has_values is False, not True"),
        ("rotated", RotatedKey(1, "bfloat16"), r"rotated is RotatedKey\(.*\), not None"),
    ],
)
def test_all_else_that_differs_is_refused_by_name(field: str, value: Any, named: str) -> None:
    with pytest.raises(Incompatible, match=f": on the peer, {named}$"):
        descriptors(layout(2, **{field: value}), layout(4), BlockPairs([], []), local_rank=0)


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(Incompatible, match=r"num_layers is 3, not 2; head_dim is 6, not 3$"):
        descriptors(
            layout(1, num_layers=3, head_dim=6), layout(2), BlockPairs([], []), local_rank=0
        )


def test_pools_of_other_sizes_are_fine_but_their_ends_are_kept() -> None:
    small = layout(2, num_blocks=2)
    assert descriptors(layout(2), small, BlockPairs([5], [1]), local_rank=0)
    for blocks in (BlockPairs([6], [1]), BlockPairs([5], [2]), BlockPairs([-1], [1])):
        with pytest.raises(ValueError, match=r"block id is .*; it must be from 0 to"):
            descriptors(layout(2), small, blocks, local_rank=0)


def test_a_rank_that_is_not_there_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match=r"rank is 2; .* must be from 0 to 1"):
        descriptors(layout(1), layout(2), BlockPairs([0], [0]), local_rank=2)


def test_a_pair_needs_both_sides() -> None:
    with pytest.raises(ValueError, match="2 producer blocks for 1 local"):
        BlockPairs([1, 2], [1])
