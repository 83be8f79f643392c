"""Which spans of memory a pull reads and fills: arithmetic on addresses, and nothing else.

blocks     source 7 8 9 3      local 2 3 4 9
spans      source [7 8 9] [3]  local [2 3 4] [9]      runs that go on both sides are one span
pieces     at most so many bytes each, whole blocks, so that other pulls come in between
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # address, bytes


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Blocks to read, pairwise: `source_ids[i]` of the peer into `local_ids[i]` here."""

    source_ids: Sequence[int]
    local_ids: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.source_ids) != len(self.local_ids):
            raise ValueError(
                f"{len(self.source_ids)} source blocks for {len(self.local_ids)} local ones"
            )


def spans(
    pairs: BlockPairs, *, source_address: int, local_address: int, block_bytes: int
) -> tuple[list[Span], list[Span]]:
    """Source spans and local spans of equal lengths, pairwise, in the order of the blocks."""
    source_spans: list[Span] = []
    local_spans: list[Span] = []
    start = 0
    for end in range(1, len(pairs.source_ids) + 1):
        if end < len(pairs.source_ids) and _follows(pairs, end):
            continue
        num_bytes = (end - start) * block_bytes
        source_spans.append((source_address + pairs.source_ids[start] * block_bytes, num_bytes))
        local_spans.append((local_address + pairs.local_ids[start] * block_bytes, num_bytes))
        start = end
    return source_spans, local_spans


def pieces(pairs: BlockPairs, *, block_bytes: int, piece_bytes_max: int) -> Iterator[BlockPairs]:
    """`pairs` in order, cut into runs of at most `piece_bytes_max`, but of one block at least."""
    blocks_max = max(1, piece_bytes_max // block_bytes)
    for start in range(0, len(pairs.source_ids), blocks_max):
        end = start + blocks_max
        yield BlockPairs(pairs.source_ids[start:end], pairs.local_ids[start:end])


def _follows(pairs: BlockPairs, index: int) -> bool:
    return (
        pairs.source_ids[index] == pairs.source_ids[index - 1] + 1
        and pairs.local_ids[index] == pairs.local_ids[index - 1] + 1
    )
