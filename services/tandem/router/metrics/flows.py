"""Counts recent pulls of KV blocks and migrations of streams for the operators' page. Does no I/O.

When a stream leaves a worker, the stream's new worker is not known yet. So `Flows` keeps the
migration until the stream runs on another worker. If that does not happen within `_LOOKS_MAX` calls
of `take`, the migration is dropped.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, NamedTuple

# Largest number of (source, target) pairs of workers whose pulls are counted, and also the largest
# number of migrations that wait for their target.
_FLOWS_MAX = 256
_LOOKS_MAX = 30  # a migration is dropped if this many calls of `take` have found no target


class Flow(NamedTuple):
    """The number of blocks ("pull") or streams ("move") that moved from one worker to another."""

    kind: Literal["pull", "move"]
    source: str
    target: str
    number: int


class Flows:
    """Collects pulls and migrations between two calls of `take`."""

    def __init__(self) -> None:
        self._pulled: Counter[tuple[str, str]] = Counter()
        self._moves: deque[tuple[str, Callable[[], str], int]] = deque(maxlen=_FLOWS_MAX)

    def note_pull(self, source: str, target: str, num_blocks: int) -> None:
        """Records blocks that `target` has pulled from `source`."""
        pair = (source, target)
        if num_blocks and source and (pair in self._pulled or len(self._pulled) < _FLOWS_MAX):
            self._pulled[pair] += num_blocks

    def note_move(self, source: str, where: Callable[[], str]) -> None:
        """Records a stream that leaves `source`.

        `where` returns the worker that has the stream now, or "" if none has it.
        """
        self._moves.append((source, where, 0))

    def take(self) -> list[Flow]:
        """Returns the pulls since the last call, and the migrations whose target is known now."""
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
