"""Has workers hand back waiting requests that would find room at others (placement/moves.py)."""

import time

from tandem.router.placement.moves import find_moves
from tandem.router.workers.cluster_view import ClusterView

_LOOK_S = 0.03  # at most so often: loads come with each step of each worker
_AFTER_S = 0.1  # a worker has had room beside a queue: what was just submitted is on its way to run


class Returns:
    """Looks at the loads that workers report, and acts on a queue beside a worker with room."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._looked_at = 0.0
        self._since: float | None = None  # monotonic seconds, of a queue beside room
        view.listen(self._look)

    def _look(self) -> None:
        if (now := time.monotonic()) - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        moves = find_moves(self._view.snapshots())
        if not moves:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= _AFTER_S:
            self._since = now
            for worker_id, count in moves.items():
                if (client := self._view.client(worker_id)) is not None:
                    client.return_waiting(count)
