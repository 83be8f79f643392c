"""Requests of nodes from Ray's autoscaler.

Ray keeps the last request; each new one replaces it. The same request is repeated at intervals,
because a fresh head knows none.
"""

import logging
import time
from collections.abc import Sequence

import ray
from ray.autoscaler.sdk import request_resources

log = logging.getLogger(__name__)

_REPEAT_INTERVAL_S = 20.0


class NodeRequests:
    """Requests nodes from Ray's autoscaler by the resources that they must have."""

    def __init__(self) -> None:
        self._told: list[tuple[dict[str, float], dict[str, str]]] = []
        self._told_at = -_REPEAT_INTERVAL_S

    def request(self, bundles: Sequence[tuple[dict[str, float], dict[str, str]]]) -> None:
        """Requests nodes with room for all bundles, each (resources, labels of its node). If Ray's
        head does not answer, the next call tries again."""
        bundles, now = list(bundles), time.monotonic()
        if bundles == self._told and now - self._told_at < _REPEAT_INTERVAL_S:
            return
        if bundles != self._told:
            log.info("Ray's autoscaler is asked for room for %d processes", len(bundles))
        try:
            request_resources(
                bundles=[dict(resources) for resources, _ in bundles],
                bundle_label_selectors=[dict(labels) for _, labels in bundles],
            )
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:
            log.warning("Ray's autoscaler cannot be asked for nodes: %s", error)
            return
        self._told, self._told_at = bundles, now
