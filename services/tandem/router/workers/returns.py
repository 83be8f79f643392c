"""Makes workers return waiting requests that other workers can run at once (placement/moves.py)."""

import time

from tandem.router.placement.moves import find_moves
from tandem.router.workers.cluster_view import ClusterView

# Shortest interval in seconds between two checks. Without this limit, every load report would cause
# a check, and each worker reports its load at each step.
_LOOK_S = 0.03
# Requests are returned only if other workers have had room for them for this many seconds. Often, a
# new request takes the room in this time.
_AFTER_S = 0.1


class Returns:
    """Checks the workers' loads, and makes workers return requests that others can run."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._looked_at = 0.0
        # Monotonic time since which waiting requests could run on another worker at once. None: no
        # waiting request could.
        self._since: float | None = None
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
