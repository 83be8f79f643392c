"""Checks whether the blocks that the prefix tree predicts are really cached on a worker. Pure.

For each worker it keeps a window of recent requests with the tokens that were predicted to be
cached when the request was placed, and those that were. Reuse on another worker counts as a hit, so
a low ratio shows that the predictions are wrong.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

WINDOW_TOKENS = 8192  # predicted tokens in the window
EVIDENCE_TOKENS = 1024  # predicted tokens that are needed for a result
REQUESTS_MIN = 4
HIT_RATIO_MIN = 0.5  # lower ratios mean wrong entries; eviction under pressure costs far less


@dataclass(slots=True)
class _Window:
    requests: deque[tuple[int, int]] = field(default_factory=deque)  # tokens: (predicted, cached)
    predicted: int = 0
    cached: int = 0


class HitWatch:
    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def observe(self, worker_id: str, predicted: int, cached: int) -> float | None:
        """Adds a request; returns the hit ratio if it is too low to trust the worker's entries.

        `cached` is a lower bound of the reused tokens. After a result the window starts again.
        """
        if predicted <= 0:
            return None
        cached = min(cached, predicted)
        window = self._windows.setdefault(worker_id, _Window())
        requests = window.requests
        requests.append((predicted, cached))
        window.predicted += predicted
        window.cached += cached
        while len(requests) > REQUESTS_MIN and window.predicted - requests[0][0] >= WINDOW_TOKENS:
            oldest_predicted, oldest_cached = requests.popleft()
            window.predicted -= oldest_predicted
            window.cached -= oldest_cached
        ratio = window.cached / window.predicted
        enough = len(requests) >= REQUESTS_MIN and window.predicted >= EVIDENCE_TOKENS
        if not enough or ratio >= HIT_RATIO_MIN:
            return None
        del self._windows[worker_id]
        return ratio

    def forget(self, worker_id: str) -> None:
        self._windows.pop(worker_id, None)

    def keep(self, worker_ids: Collection[str]) -> None:
        """Drops all other workers."""
        for worker_id in self._windows.keys() - set(worker_ids):
            del self._windows[worker_id]
