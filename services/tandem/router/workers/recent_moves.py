"""Counts the streams that have recently left a decode worker and continue on other ones, so that
operators see what became of the streams of a lost or drained worker. Does no I/O."""

from collections import Counter, deque

_KEPT_S = 60.0  # age in seconds after which a move is not counted any more
_MOVES_MAX = 1000  # largest number of moves that are kept
_WORKERS_MAX = 2  # largest number of workers that the text names


class RecentMoves:
    def __init__(self) -> None:
        # (monotonic seconds of the move, worker that the stream left)
        self._moves: deque[tuple[float, str]] = deque(maxlen=_MOVES_MAX)

    def note(self, source: str, now: float) -> None:
        """Records that a stream moves off the worker `source` at `now`, in monotonic seconds."""
        if source:
            self._moves.append((now, source))

    def text(self, now: float) -> str:
        """Returns for example "3 streams of decode-0 moved to other workers" for the moves of the
        last minute, or "" if there are none."""
        while self._moves and now - self._moves[0][0] > _KEPT_S:
            self._moves.popleft()
        counts = Counter(source for _, source in self._moves).most_common(_WORKERS_MAX)
        return " and ".join(
            f"{number} stream{'s' if number > 1 else ''} of {source} moved to other workers"
            for source, number in counts
        )
