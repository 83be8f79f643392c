"""KV that travelled of late, for the operators' picture: who pulled blocks from whom, and streams
that moved off a worker. Pure.

A move is known before its target is: it waits here until the request has another worker, or is
forgotten. Everything is bounded, and what nobody takes is dropped, the oldest first.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, NamedTuple

_FLOWS_MAX = 256  # pairs of workers between two looks, and moves that wait for their target
_LOOKS_MAX = 30  # that a move waits


class Flow(NamedTuple):
    """Blocks, or streams, that went from one worker to another."""

    kind: Literal["pull", "move"]
    source: str
    target: str
    number: int


class Flows:
    """The flows since they were last taken."""

    def __init__(self) -> None:
        self._pulled: Counter[tuple[str, str]] = Counter()
        self._moves: deque[tuple[str, Callable[[], str], int]] = deque(maxlen=_FLOWS_MAX)

    def note_pull(self, source: str, target: str, num_blocks: int) -> None:
        """Notes blocks that `target` has pulled from `source`."""
        pair = (source, target)
        if num_blocks and source and (pair in self._pulled or len(self._pulled) < _FLOWS_MAX):
            self._pulled[pair] += num_blocks

    def note_move(self, source: str, where: Callable[[], str]) -> None:
        """Notes a stream that moves off `source`; `where` tells the worker that has it now."""
        self._moves.append((source, where, 0))

    def take(self) -> list[Flow]:
        """Returns what is new, and forgets it."""
        pulled = self._pulled
        self._pulled = Counter()
        flows = [Flow("pull", *pair, number) for pair, number in pulled.items()]
        moved: Counter[tuple[str, str]] = Counter()
        for _ in range(len(self._moves)):
            source, where, num_looks = self._moves.popleft()
            if (target := where()) not in ("", source):
                moved[source, target] += 1
            elif num_looks < _LOOKS_MAX:
                self._moves.append((source, where, num_looks + 1))
        return flows + [Flow("move", *pair, number) for pair, number in moved.items()]
