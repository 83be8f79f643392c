"""The pool controller: a detached Ray actor that owns the wanted size of each pool.

One thread owns all state and takes one event at a time: a scale request (from Redis or by a call),
an agent's report, an agent found anew. After each it compares wanted with actual (`pools.plan`),
makes and drains agents, writes what it owns to its file, and tells Redis. Started again by Ray, it
reads the file, takes the agents by their names, and asks each how it is.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray

from tandem.cluster.pools import ClusterSpec, Member, MemberState, describe, plan
from tandem.cluster.processes import owned
from tandem.cluster.processes.owned import Owned
from tandem.cluster.ray.agent import CONTROLLER_NAME, Agent
from tandem.cluster.ray.scale_channel import ScaleChannel
from tandem.config.cluster import REDIS_URL_VARIABLE
from tandem.observability.logs import configure_logging
from tandem.pool_sizes import check_sizes

log = logging.getLogger(__name__)

_EVENTS_MAX = 10_000


class PoolController:
    """Owns the pools of one cluster; `start_controller` makes it."""

    def __init__(self, spec: ClusterSpec) -> None:
        configure_logging(CONTROLLER_NAME)
        self._spec = spec
        self._run_folder = Path(spec.run_folder)
        self._owned = owned.read(self._run_folder) or Owned(dict(spec.wanted), [])
        self._agents: dict[str, Any] = {}
        self._events: queue.Queue[Callable[[], None]] = queue.Queue(_EVENTS_MAX)
        self._channel = ScaleChannel(os.environ[REDIS_URL_VARIABLE], spec.cluster_id, self.scale)
        threading.Thread(target=self._run, name="pools", daemon=True).start()

    def scale(self, sizes: object) -> None:
        """Sets the wanted size of the pools named. Raises BadRequest saying what is allowed."""
        checked = check_sizes(sizes)
        self._events.put(lambda: self._owned.wanted.update(checked))

    def report(
        self, agent_name: str, state: MemberState, pid: int, num_starts: int, last_line: str = ""
    ) -> None:
        """Takes an agent's report about its process."""
        told = {"pid": pid, "num_starts": num_starts, "last_line": last_line, "since": time.time()}
        self._events.put(lambda: self._take_report(agent_name, state, told))

    def state(self) -> dict[str, object]:
        """Returns the state of all pools as in Redis."""
        return describe(self._owned.wanted, self._owned.members)

    def _run(self) -> None:
        for member in self._owned.members:
            self._attach(member)
        self._channel.start()
        while True:
            self._reconcile()
            self._events.get()()

    def _reconcile(self) -> None:
        members = self._owned.members
        add, drain = plan(self._spec, self._owned.wanted, members)
        for member in drain:
            self._replace(member, state="draining")
        members += add
        # Before an agent is made: one that nobody knows could not be drained. And before one is
        # told: if it dies then, the next reads here that its process is not to be started again.
        self._owned.write(self._run_folder)
        for member in drain:
            log.info("draining %s", member.member_id)
            self._agents[member.agent_name].drain.remote()
        for member in add:
            log.info("adding %s", member.member_id)
            self._attach(member)
        self._channel.publish(self.state())

    def _attach(self, member: Member) -> None:
        """Makes the member's agent, or finds the one that is there."""
        actor = ray.remote(
            num_cpus=0, max_restarts=-1, lifetime="detached", resources={member.pool: 1}
        )(Agent)
        agent = actor.options(name=member.agent_name, get_if_exists=True).remote(self._spec, member)
        self._agents[member.agent_name] = agent
        if member.pid or member.leaves:  # it is not new: it may not report by itself
            threading.Thread(target=self._ask, args=(agent,), daemon=True).start()

    def _ask(self, agent: Any) -> None:
        try:
            self.report(*ray.get(agent.status.remote(), timeout=30))
        except ray.exceptions.RayError as error:
            log.warning("an agent does not answer, it will report when it is up: %s", error)

    def _take_report(self, agent_name: str, state: MemberState, told: Mapping[str, object]) -> None:
        member = next((m for m in self._owned.members if m.agent_name == agent_name), None)
        if member is None:
            return
        if state == "gone":
            self._owned.members.remove(member)
            ray.kill(self._agents.pop(agent_name))
            log.info("%s is gone", member.member_id)
            return
        if member.leaves and state != "draining":
            # The agent was started again by Ray and does not know that it was draining.
            self._agents[agent_name].drain.remote()
            state = "draining"
        self._replace(member, state=state, **told)

    def _replace(self, member: Member, **changes: object) -> None:
        at = self._owned.members.index(member)
        self._owned.members[at] = msgspec.structs.replace(member, **changes)


def start_controller(spec: ClusterSpec) -> Any:
    """Makes the cluster's controller and returns its handle; the caller is connected to Ray.

    Redis's URL is not among its arguments but in its node's environment: Ray stores arguments.
    """
    actor = ray.remote(num_cpus=0, max_restarts=-1, lifetime="detached")(PoolController)
    return actor.options(name=CONTROLLER_NAME).remote(spec)
