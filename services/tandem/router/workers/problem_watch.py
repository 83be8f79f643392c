"""Logs the workers' problems, adds them to the events, and keeps them for metrics.

A problem is logged when it begins and when it ends. If a worker's process ends, its exit cause and
last log line are logged, because another process may run before an operator looks.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.router.workers.events import EventLog
from tandem.router.workers.rows import WorkerRow, ending

log = logging.getLogger(__name__)

# Usual states during the start of a worker. They are not logged as problems.
_USUAL = {"loading", "starting", "restarting"}
_SAME_S = 30  # if several routers add the same event within this many seconds, it is added once


class ProblemWatch:
    """Compares the current problems with the previous ones; reports what has begun or ended."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.rows: list[WorkerRow] = []
        self.num_starts: dict[str, int] = {}  # worker id -> number of restarts of its process
        self._starts_reported: dict[str, int] = {}
        self._reported: dict[str, str] = {}  # worker id -> problem at the last call of `note`
        self._cluster_reported: dict[str, str] = {}

    def note(
        self,
        rows: list[WorkerRow],
        pools: Mapping[str, Mapping[str, Any]],
        cluster: Mapping[str, str],
    ) -> None:
        """Takes the current rows and pools, and a phrase for each other problem in the cluster."""
        self.rows = rows
        for row in rows:
            self._note_row(row)
        self._reported = {row.worker_id: row.problem for row in rows}
        for part, phrase in cluster.items():
            if part not in self._cluster_reported:
                self._report("problem", part, phrase)
        for part in self._cluster_reported.keys() - cluster.keys():
            self._report("well", part, "the problem is over")
        self._cluster_reported = dict(cluster)
        agents = [a for n, p in pools.items() if n != "router" for a in p.get("agents", ())]
        self._note_agents(agents)

    def _note_row(self, row: WorkerRow) -> None:
        before = self._reported.get(row.worker_id, "")
        now = row.problem
        if before == now:
            return
        if now and now not in _USUAL:
            self._report(now, row.worker_id, row.note or f"it is {row.state}")
        elif before and before not in _USUAL and not now:
            self._report("well", row.worker_id, f"it is {row.state} again; it was {before}")

    def _note_agents(self, agents: Iterable[Mapping[str, Any]]) -> None:
        self.num_starts = {}
        before = self._starts_reported
        self._starts_reported = {}
        for agent in agents:
            name = agent["id"]
            starts = agent.get("starts", 0)
            ended = starts + (agent.get("state") == "restarting")
            self.num_starts[name] = starts
            self._starts_reported[name] = ended
            if ended > before.get(name, ended):
                # The event's key has the number of ended processes and the time. The number alone
                # may repeat, because a new agent counts from 0 again.
                when = int(agent.get("since", 0.0)) // _SAME_S
                text = ending(agent) or "ended"
                self._report("ended", name, text, once=f"{ended}:{when}")

    def _report(self, kind: str, about: str, text: str, once: str = "") -> None:
        level = logging.INFO if kind == "well" else logging.WARNING
        log.log(level, "%s: %s: %s", about, kind, text)
        self._events.add(kind, about, text, once=f"{about}:{once or int(time.time()) // _SAME_S}")
