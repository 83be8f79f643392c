"""A radix tree over block hashes in this process, as routers that share with nobody keep one.

To measure against: an edge is a run of hashes that does not branch, a node has the bits of the
workers that hold all up to there. Chains are stored for good; nothing is removed.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Node:
    __slots__ = ("children", "holders", "run")

    def __init__(self, run: list[bytes], holders: int) -> None:
        self.run = run  # of the edge that leads here
        self.holders = holders
        self.children: dict[bytes, _Node] = {}  # by the first hash of their run


class RadixTree:
    def __init__(self) -> None:
        self._root = _Node([], 0)
        self._worker_ids: list[str] = []
        self._bits: dict[str, int] = {}

    def store(self, worker_id: str, chain: Sequence[bytes]) -> None:
        """The worker holds the whole chain, from its root on."""
        if worker_id not in self._bits:
            self._bits[worker_id] = 1 << len(self._worker_ids)
            self._worker_ids.append(worker_id)
        bit, node, at = self._bits[worker_id], self._root, 0
        while at < len(chain):
            child = node.children.get(chain[at])
            if child is None:
                node.children[chain[at]] = _Node(list(chain[at:]), bit)
                return
            same = _common(child.run, chain, at)
            if same < len(child.run):
                child = node.children[chain[at]] = _split(child, same)
            child.holders |= bit
            node, at = child, at + same

    async def match(self, chain: Sequence[bytes]) -> dict[str, int]:
        """Returns how many leading blocks of the chain each worker holds. It is awaited as the
        other trees' is."""
        depths: dict[str, int] = {}
        node, at, holders = self._root, 0, (1 << len(self._worker_ids)) - 1
        while holders:
            child = node.children.get(chain[at]) if at < len(chain) else None
            staying = holders & child.holders if child is not None else 0
            self._report(holders ^ staying, at, depths)
            if child is None or not staying:
                break
            same = _common(child.run, chain, at)
            at += same
            if same < len(child.run):
                self._report(staying, at, depths)
                break
            node, holders = child, staying
        return depths

    def _report(self, holders: int, depth: int, depths: dict[str, int]) -> None:
        while depth and holders:
            low = holders & -holders
            depths[self._worker_ids[low.bit_length() - 1]] = depth
            holders ^= low


def _common(run: list[bytes], chain: Sequence[bytes], at: int) -> int:
    """Returns how many hashes of the run the chain has from `at` on."""
    if run == chain[at : at + len(run)]:
        return len(run)
    length = min(len(run), len(chain) - at)
    return next((i for i in range(length) if run[i] != chain[at + i]), length)


def _split(node: _Node, at: int) -> _Node:
    upper = _Node(node.run[:at], node.holders)
    node.run = node.run[at:]
    upper.children[node.run[0]] = node
    return upper
