"""A stand-in for the API server whose StatefulSets have pods that start and are replaced.

The controller acts whenever a StatefulSet is read, as documented by Kubernetes: pods of a pool
start in parallel; a new template replaces them in place, from the highest ordinal down, each one
after those above it are ready. A status shows the state before that action.

https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/#rolling-updates
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field

from tests.harness.helm_server import HelmServer, Object

_LOOKS_TO_START = 3


@dataclass
class StatefulPod:
    revision: str
    num_looks: int = _LOOKS_TO_START  # number of reads until it is ready


@dataclass
class StatefulSetServer(HelmServer):
    """`room` is the number of pods of one pool that can start. `fewest` has, by path, the lowest
    number of ready pods at any read since `settle`."""

    room: int = 100
    pods: dict[str, list[StatefulPod]] = field(default_factory=dict)
    fewest: dict[str, int] = field(default_factory=dict)
    _revisions: dict[str, str] = field(default_factory=dict)  # revision that all pods had last
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str) -> Object | None:
        found = super().answer(path)
        if found is not None and found.get("kind") == "StatefulSet":
            with self._lock:
                self._look(path, found)
        return found

    def settle(self, path: str) -> int:
        """Reads a StatefulSet until it has settled. Returns the value of `fewest`."""
        while True:
            status = (self.answer(path) or {})["status"]
            size = self.objects[path]["spec"]["replicas"]
            if status["readyReplicas"] == size and self._revisions[path] == self._wanted(path):
                break
        fewest = self.fewest[path]
        self.fewest[path] = size
        return fewest

    def _wanted(self, path: str) -> str:
        return json.dumps(self.objects[path]["spec"]["template"])

    def _look(self, path: str, made: Object) -> None:
        pods = self.pods.setdefault(path, [])
        size = made["spec"]["replicas"]
        wanted = self._wanted(path)
        del pods[size:]
        pods += [StatefulPod(wanted) for _ in range(size - len(pods))]
        for pod in pods[: self.room]:
            pod.num_looks = max(0, pod.num_looks - 1)
        seen_ready = sum(not pod.num_looks for pod in pods)
        for ordinal in reversed(range(size)):
            if pods[ordinal].revision != wanted:
                pods[ordinal] = StatefulPod(wanted)
                break
            if pods[ordinal].num_looks:
                break
        else:
            self._revisions[path] = wanted
        num_ready = sum(not pod.num_looks for pod in pods)
        self.fewest[path] = min(num_ready, self.fewest.get(path, num_ready))
        made["status"] = {
            "replicas": len(pods),
            "readyReplicas": seen_ready,
            "currentRevision": self._revisions.get(path),
            "updateRevision": wanted,
        }
