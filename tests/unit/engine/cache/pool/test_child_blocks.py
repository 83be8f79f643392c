"""The closest child of a parent, beside a search through all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.cache.pool.child_blocks import ChildBlocks, PartialMatch

TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 1 << 31]), min_size=4, max_size=4)


def num_common(one: list[int], other: list[int]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return (*same, False).index(False)


@given(
    st.lists(TOKENS, unique_by=tuple, max_size=12),
    st.sets(st.integers(0, 11)),
    st.lists(st.sampled_from([0, 1, 255, 256, 1 << 31]), max_size=4),
)
def test_the_closest_child_has_the_longest_common_beginning(
    children: list[list[int]], removed: set[int], wanted: list[int]
) -> None:
    blocks = ChildBlocks()
    for number, tokens in enumerate(children):
        blocks.add(b"parent", b"%d" % number, tokens)
    for number in removed:
        blocks.remove(b"%d" % number)
    left = {b"%d" % i: each for i, each in enumerate(children) if i not in removed}
    assert blocks.block_hashes() == set(left)
    best = max((num_common(wanted, each) for each in left.values()), default=0)
    found = blocks.closest(b"parent", wanted)
    assert [each.num_tokens for each in found[:1]] == [best] * (best > 0)
    for num_tokens, block_hash in found:
        assert num_common(wanted, left[block_hash]) == num_tokens > 0


def test_children_of_another_parent_are_not_found() -> None:
    blocks = ChildBlocks()
    blocks.add(b"one", b"a", [1, 2, 3, 4])
    blocks.add(b"two", b"b", [1, 2, 9, 9])
    assert blocks.closest(b"two", [1, 2, 3, 4]) == [PartialMatch(2, b"b")]
    assert blocks.closest(b"three", [1, 2, 3, 4]) == []
