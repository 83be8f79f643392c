from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.transfer.descriptors import BlockPairs, pieces, spans

pairs_of_blocks = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=24)


def test_blocks_that_go_on_at_both_sides_are_one_span() -> None:
    pairs = BlockPairs(source_ids=[7, 8, 9, 3], local_ids=[2, 3, 4, 9])
    source, local = spans(pairs, source_address=1000, local_address=5000, block_bytes=10)
    assert source == [(1070, 30), (1030, 10)]
    assert local == [(5020, 30), (5090, 10)]


def test_blocks_that_go_on_at_one_side_only_stay_apart() -> None:
    pairs = BlockPairs(source_ids=[0, 1, 2], local_ids=[5, 7, 6])
    source, local = spans(pairs, source_address=0, local_address=0, block_bytes=4)
    assert source == [(0, 4), (4, 4), (8, 4)]
    assert local == [(20, 4), (28, 4), (24, 4)]


def test_no_blocks_give_no_spans() -> None:
    pairs = BlockPairs([], [])
    assert spans(pairs, source_address=0, local_address=0, block_bytes=4) == ([], [])
    assert list(pieces(pairs, block_bytes=4, piece_bytes_max=8)) == []


def test_a_pair_needs_both_sides() -> None:
    with pytest.raises(ValueError, match="2 source blocks for 1 local"):
        BlockPairs([1, 2], [1])


def test_a_block_larger_than_a_piece_is_a_piece() -> None:
    cut = list(pieces(BlockPairs([1, 2], [3, 4]), block_bytes=100, piece_bytes_max=8))
    assert cut == [BlockPairs([1], [3]), BlockPairs([2], [4])]


@given(pairs_of_blocks, st.integers(1, 7), st.integers(1, 40))
def test_spans_of_all_pieces_are_exactly_the_blocks(
    blocks: list[tuple[int, int]], block_bytes: int, piece_bytes_max: int
) -> None:
    pairs = BlockPairs([source for source, _ in blocks], [local for _, local in blocks])
    moved: list[tuple[int, int]] = []
    for piece in pieces(pairs, block_bytes=block_bytes, piece_bytes_max=piece_bytes_max):
        assert len(piece.local_ids) * block_bytes <= max(piece_bytes_max, block_bytes)
        source, local = spans(
            piece, source_address=10_000, local_address=50_000, block_bytes=block_bytes
        )
        for (source_at, source_bytes), (local_at, local_bytes) in zip(source, local, strict=True):
            assert source_bytes == local_bytes
            moved += [(source_at + i, local_at + i) for i in range(source_bytes)]
    assert moved == [
        (10_000 + source * block_bytes + i, 50_000 + local * block_bytes + i)
        for source, local in blocks
        for i in range(block_bytes)
    ]
