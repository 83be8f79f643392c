"""What a transfer is about: spans of memory, and blocks in pairs."""

from __future__ import annotations

from collections.abc import Sequence
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
