"""An external program that follows a worker's KV events, like the indexer of llm-d.

It knows a block only by its parent: a block's position is one after its parent's, and a block
without a parent is the first of its chain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgpack
import msgspec

from tandem.common.block_hash import block_hash
from tandem.engine.types import StepReport
from tandem.worker.lifecycle.kv_events import ToldBlocks


class KvIndexer:
    def __init__(self, block_size: int, roots: Collection[bytes] = ()) -> None:
        """`roots` are the allowed roots of hash chains; empty: hashes are not checked."""
        self._told = ToldBlocks(block_size)
        self._block_size = block_size
        self._roots = roots
        self.positions: dict[bytes, int] = {}
        self.parents: dict[bytes, bytes | None] = {}

    def follow(self, step: StepReport) -> None:
        """Applies the events of a report, as decoded by a subscriber."""
        self.take(msgpack.unpackb(msgspec.msgpack.encode(self._told.take(step))))

    def take(self, events: Iterable[Any]) -> None:
        """Applies events. Raises AssertionError if one refers to an unknown block or is
        malformed."""
        for name, *fields in events:
            if name == "AllBlocksCleared":
                self.positions.clear()
            elif name == "BlockRemoved":
                for removed in fields[0]:
                    del self.positions[removed], self.parents[removed]
            else:
                self._store(*fields[:3])

    def _store(self, hashes: list[bytes], parent: bytes | None, token_ids: list[int]) -> None:
        size = self._block_size
        assert len(token_ids) in (0, size * len(hashes)), "token ids are of other blocks"
        for index, name in enumerate(hashes):
            assert parent is None or parent in self.positions, "the parent was never told of"
            assert name not in self.positions, "the block is told of twice"
            tokens = token_ids[index * size : (index + 1) * size]
            if tokens and self._roots:
                before = self._roots if parent is None else (parent,)
                assert name in [block_hash(each, tokens) for each in before], "a false position"
            self.positions[name] = 0 if parent is None else self.positions[parent] + 1
            self.parents[name] = parent
            parent = name

    def check_chains(self, resumable: Iterable[bytes]) -> None:
        """Raises AssertionError unless exactly these blocks and their ancestors are known."""
        wanted: set[bytes | None] = set()
        for name in resumable:
            above: bytes | None = name
            while above is not None and above not in wanted:
                wanted.add(above)
                above = self.parents[above]
        assert wanted == self.positions.keys()
