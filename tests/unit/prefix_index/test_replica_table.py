"""The compiled table of a replica against a dict."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.prefix_index._replica_table import Table

# Few first bytes and fields, so that parts grow, shrink and have long runs.
ENTRIES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 40)).map(
        lambda drawn: bytes(drawn[:2]) + drawn[2].to_bytes(8, "little")
    ),
    max_size=60,
)
MASKS = st.integers(1, (1 << 64) - 1) | st.integers(0, 63).map(lambda slot: 1 << slot)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove", "clear"]), MASKS, ENTRIES), max_size=12
)
ALL = (1 << 64) - 1


@given(CHANGES, st.integers(0, ALL), st.sampled_from([10, 16]))
def test_a_table_equals_a_dict(
    changes: list[tuple[str, int, list[bytes]]], seed: int, stride: int
) -> None:
    table, masks = Table(seed), dict[bytes, int]()
    for name, mask, entries in changes:
        packed = b"".join(entry + bytes(stride - 10) for entry in entries)
        match name:
            case "add":
                table.add(mask, packed, stride)
                masks |= {entry: masks.get(entry, 0) | mask for entry in entries}
            case "remove":
                table.remove(mask, packed, stride)
                masks |= {entry: masks[entry] & ~mask for entry in entries if entry in masks}
            case "clear":
                table.clear(mask, 1, 256)
                masks = {e: m & ~mask if e[0] else m for e, m in masks.items()}
        masks = {entry: mask for entry, mask in masks.items() if mask}
        counts = Counter(slot for m in masks.values() for slot in range(64) if m >> slot & 1)
        assert table.num_entries == len(masks)
        assert [table.count(slot) for slot in range(64)] == [counts[slot] for slot in range(64)]
    for entry in {entry for _, _, entries in changes for entry in entries}:
        slots = [slot for slot in range(64) if masks.get(entry, 0) >> slot & 1]
        assert table.match([entry], ALL, True)[::2] == slots
        assert table.match([entry], ALL, False)[::2] == slots


def test_a_table_of_random_blocks_takes_at_most_40_bytes_a_block() -> None:
    table = Table(1)
    blocks = b"".join(number.to_bytes(16, "big")[::-1] for number in range(100_000))
    for start in range(0, len(blocks), 16_000):
        table.add(1, blocks[start : start + 16_000], 16)
        if start > 800_000:
            assert table.num_bytes <= 40 * table.num_entries
    for start in range(0, 800_000, 16_000):
        table.remove(1, blocks[start : start + 16_000], 16)
        assert table.num_bytes <= 40 * table.num_entries
    table.clear(1, 0, 256)
    assert table.num_entries == 0
    assert table.num_bytes < 100_000


def test_arguments_of_a_wrong_kind_are_refused() -> None:
    table = Table(1)
    with pytest.raises(ValueError, match="10 bytes"):
        table.add(1, bytes(15), 10)
    with pytest.raises(ValueError, match="10 bytes"):
        table.remove(1, bytes(9), 9)
    with pytest.raises(ValueError, match="parts 0 to 257"):
        table.clear(1, 0, 257)
    with pytest.raises(ValueError, match="slot 64"):
        table.count(64)
    for bad in ("0123456789", b"012345678"):
        with pytest.raises(ValueError, match="block hash"):
            table.match([bad], ALL, True)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        table.match(5, ALL, True)  # type: ignore[arg-type]
