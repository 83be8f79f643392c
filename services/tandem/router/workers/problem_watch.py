"""Tells in the log and in the events what becomes wrong with workers, and keeps it for metrics.

A problem is told when it begins and when it is over; a process that ended is told with how it ended
and its last log line, for another one may run before anybody looks.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.router.workers.events import EventLog
from tandem.router.workers.rows import WorkerRow, ending

log = logging.getLogger(__name__)

_USUAL = {"loading", "starting", "restarting"}  # `ended` and `started` tell of these
_SAME_S = 30  # within which routers tell of the same


class ProblemWatch:
    """The problems as this router saw them last."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.rows: list[WorkerRow] = []
        self.num_starts: dict[str, int] = {}  # by worker, as its agent counts them
        self._starts_told: dict[str, int] = {}
        self._told: dict[str, str] = {}  # the problem of each worker
        self._cluster_told: dict[str, str] = {}

    def note(
        self,
        rows: list[WorkerRow],
        pools: Mapping[str, Mapping[str, Any]],
        cluster: Mapping[str, str],
    ) -> None:
        """Takes in the rows and pools of now, and what is wrong with the cluster itself: a phrase
        for each part of it."""
        self.rows = rows
        for row in rows:
            self._note_row(row)
        self._told = {row.worker_id: row.problem for row in rows}
        for part, phrase in cluster.items():
            if part not in self._cluster_told:
                self._tell("problem", part, phrase)
        for part in self._cluster_told.keys() - cluster.keys():
            self._tell("well", part, "it is well again")
        self._cluster_told = dict(cluster)
        agents = [a for n, p in pools.items() if n != "router" for a in p.get("agents", ())]
        self._note_agents(agents)

    def _note_row(self, row: WorkerRow) -> None:
        before = self._told.get(row.worker_id, "")
        now = row.problem
        if before == now:
            return
        if now and now not in _USUAL:
            self._tell(now, row.worker_id, row.note or f"it is {row.state}")
        elif before and before not in _USUAL and not now:
            self._tell("well", row.worker_id, f"it is {row.state}, and was {before}")

    def _note_agents(self, agents: Iterable[Mapping[str, Any]]) -> None:
        self.num_starts = {}
        before = self._starts_told
        self._starts_told = {}
        for agent in agents:
            name = agent["id"]
            starts = agent.get("starts", 0)
            ended = starts + (agent.get("state") == "restarting")
            self.num_starts[name] = starts
            self._starts_told[name] = ended
            if ended > before.get(name, ended):
                # A new agent counts anew, and a new worker may have an old one's name.
                when = int(agent.get("since", 0.0)) // _SAME_S
                told = ending(agent) or "its process ended"
                self._tell("ended", name, told, once=f"{ended}:{when}")

    def _tell(self, kind: str, about: str, text: str, once: str = "") -> None:
        level = logging.INFO if kind == "well" else logging.WARNING
        log.log(level, "%s: %s: %s", about, kind, text)
        self._events.add(kind, about, text, once=f"{about}:{once or int(time.time()) // _SAME_S}")
