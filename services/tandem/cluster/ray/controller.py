"""The pool controller: a detached Ray actor that brings each pool to its wanted size.

Only one thread changes the state. It handles one event at a time: a scale request (from Redis or a
call), an agent's report, or a change of the hosts. After each event it compares wanted and actual
pools (`pools.plan`), writes the new state to a file, creates and drains agents, and publishes the
state of the pools in Redis. When Ray restarts the actor, the actor reads the file, finds the agents
by name, and requests their status.

If machines can join, the state is also in Redis. Redis refuses the controller's writes once another
head has a higher fencing number (head_lease.py). The controller then stops for good. It acts only
on state that it has written to Redis, so it changes nothing while Redis is unreachable.

On nodes of a Ray cluster with an autoscaler, the controller requests the nodes that the wanted
sizes need (`NodeRequests`). After a member has drained, its agent is removed, and Ray ends a node
without agents.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.autoscaler.sdk import request_resources

from tandem.cluster.pool_state import describe, gpu_waits
from tandem.cluster.pools import (
    ClusterSpec,
    Leave,
    Member,
    MemberState,
    lose,
    node_bundles,
    plan,
    revive,
)
from tandem.cluster.processes import owned
from tandem.cluster.processes.owned import Owned, SharedOwned
from tandem.cluster.ray.agent import CONTROLLER_NAME, Agent
from tandem.cluster.ray.host_watch import HostWatch
from tandem.cluster.ray.node import HOST_LABEL, NODE_LABEL
from tandem.cluster.ray.scale_channel import ScaleChannel
from tandem.cluster.ray.vital_thread import start_vital
from tandem.common.config.cluster import REDIS_URL_VARIABLE, Pool
from tandem.common.pool_sizes import check_sizes
from tandem.net.observability.logs import configure_logging
from tandem.net.store.client import UNREACHABLE

log = logging.getLogger(__name__)

_EVENTS_MAX = 10_000
_LOST_MAX = 100
_REPEAT_INTERVAL_S = 20.0  # seconds after which an unchanged request for nodes is sent again
_RETRY_S = 2.0  # seconds between two attempts to write the state


class PoolController:
    """Brings the pools of one cluster to their wanted sizes. `start_controller` creates it."""

    def __init__(self, spec: ClusterSpec) -> None:
        configure_logging(CONTROLLER_NAME)
        self._spec = spec
        self._run_folder = Path(spec.run_folder)
        redis_url = os.environ[REDIS_URL_VARIABLE]
        self._shared: SharedOwned | None = None
        if spec.number:
            self._shared = SharedOwned(redis_url, spec.cluster_id, spec.number)
        self._owned = self._read() or Owned(dict(spec.wanted), [])
        self._leaving: dict[str, Leave] = {}
        self._waits: dict[Pool, str] = {}
        self._written = b""
        self._published: dict[str, object] = {}
        self._agents: dict[str, Any] = {}
        self._events: queue.Queue[Callable[[], None]] = queue.Queue(_EVENTS_MAX)
        self._channel = ScaleChannel(redis_url, spec.cluster_id, self.scale, number=spec.number)
        own = None if spec.on_nodes else spec.host
        expected = [] if spec.on_nodes else self._owned.hosts
        self._hosts = HostWatch(own, spec.host_before, expected)
        self._nodes = NodeRequests()
        start_vital("pools", self._run)

    def scale(self, sizes: object) -> None:
        """Sets the wanted sizes of the pools in `sizes`. Raises BadRequest that names the allowed
        sizes."""
        checked = {p: size for p, size in check_sizes(sizes).items() if p in self._spec.pools}
        self._events.put(lambda: self._owned.wanted.update(checked))

    def report(
        self,
        agent_name: str,
        state: MemberState,
        pid: int,
        num_starts: int,
        last_line: str = "",
        ending: str = "",
        is_stopped: bool = False,
    ) -> None:
        """Queues an agent's report about its process."""
        process = {
            "pid": pid,
            "num_starts": num_starts,
            "last_line": last_line,
            "ending": ending,
            "is_stopped": is_stopped,
        }
        self._events.put(lambda: self._take_report(agent_name, state, process))

    def state(self) -> dict[str, object]:
        """Builds the state of all pools in the form that is published in Redis."""
        return describe(self._owned.wanted, self._owned.members, self._spec.pools, self._waits)

    def _read(self) -> Owned | None:
        """Reads the state that the previous controller wrote to Redis and to the file. Returns the
        state with the higher fencing number."""
        found = [owned.read(self._run_folder), self._shared.read() if self._shared else None]
        return max((f for f in found if f), key=lambda f: f.number, default=None)

    def _run(self) -> None:
        for member in self._owned.members:
            if member.state != "lost":
                self._attach(member)
        self._channel.start()
        if self._shared is not None:
            # If Ray restarted this actor, the host of the previous head may have joined already.
            # Without this update, that host would count as lost.
            self._update_hosts()
            self._hosts.start(lambda: self._events.put(self._update_hosts))
        while not self._channel.is_superseded:
            is_done = self._reconcile()
            with suppress(queue.Empty):
                self._events.get(timeout=None if is_done else _RETRY_S)()
        log.warning(
            "this pool controller ends, because the pool controller of another Ray head took over"
        )

    def _update_hosts(self) -> None:
        """Updates the reachable hosts and those that want to leave. If Redis lost its data, the
        state is written again."""
        assert self._shared is not None
        self._hosts.update()
        self._leaving = self._shared.leaving()
        if not self._shared.has(self._written):
            self._written = b""

    def _reconcile(self) -> bool:
        """Moves the pools towards their wanted sizes. Returns False and does nothing if the new
        state cannot be written."""
        members = self._owned.members
        lost = lose(members, {m.host for m in members if self._hosts.is_lost(m.host)})
        back = revive(members, self._hosts.alive)
        changed = {m.ordinal: m for m in (*lost, *back)}
        planned = [changed.get(m.ordinal, m) for m in members]
        add, drain = self._plan(planned)
        draining = {m.ordinal for m in drain}
        planned = [
            msgspec.structs.replace(m, state="draining") if m.ordinal in draining else m
            for m in planned
        ]
        # The state is written before agents are created or drained. If the controller restarts
        # after it created an agent, it must find the agent in the state. If an agent restarts after
        # it was drained, it must find in the state that its process is not wanted any more.
        ended = {m.ordinal for m in lost} & {m.ordinal for m in members if self._has_drained(m)}
        kept = _without_oldest_lost([m for m in (*planned, *add) if m.ordinal not in ended])
        if not self._write(Owned(self._owned.wanted, kept, self._spec.number, self._hosts.known())):
            return False
        for member in lost:
            log.warning(
                "%s is lost, because its host %s does not answer", member.member_id, member.host
            )
            self._forget_agent(member)
        for member in drain:
            log.info("draining %s", member.member_id)
            if member.agent_name in self._agents:
                self._agents[member.agent_name].drain.remote()
        for member in (*back, *add):
            where = f" on host {member.host}" if member.host else ""
            why = f", because {member.placed_why}" if member.placed_why else ""
            log.info("adding %s%s%s", member.member_id, where, why)
            self._attach(member)
        if self._spec.requests_nodes:
            self._nodes.request(node_bundles(self._spec, self._owned.wanted, self._owned.members))
        self._note_waits()
        if (state := self.state()) != self._published:
            self._published = state
            self._channel.publish(state)
        return True

    def _plan(self, members: list[Member]) -> tuple[list[Member], list[Member]]:
        """Computes the members to add and to drain. Bandwidths are read only if there is a member
        to place and a choice of hosts."""
        hosts = self._hosts.usable()
        now = (self._spec, self._owned.wanted, members, hosts, self._leaving)
        add, drain = plan(*now)
        if add and len(hosts) > 1 and self._shared is not None:
            measured = self._shared.pair_bandwidths([m.member_id for m in members])
            add, drain = plan(*now, measured)
        return add, drain

    def _note_waits(self) -> None:
        """Updates the reasons why pools wait for a GPU, and logs new ones."""
        hosts = self._hosts.usable()
        now = self._owned
        waits = gpu_waits(self._spec, now.wanted, now.members, hosts, self._leaving)
        for pool in waits.keys() - self._waits.keys():
            log.warning("the %s pool waits for a GPU: %s", pool, waits[pool])
        self._waits = waits

    def _write(self, new: Owned) -> bool:
        """Writes the new state to Redis and to the file. Returns False, and keeps the current
        state, if that fails."""
        encoded = msgspec.json.encode(new)
        if encoded == self._written:
            return True
        if self._shared is not None:
            try:
                if not self._shared.write(new):
                    self._channel.supersede()
                    return False
            except UNREACHABLE as error:
                log.warning("Redis does not answer (%s), so the pools stay as they are", error)
                return False
        try:
            new.write(self._run_folder)
        except OSError as error:
            # If Redis has the state, too, the file is only a copy.
            effect = "so the pools stay as they are" if self._shared is None else "but Redis has it"
            log.warning(
                "the state of the pools cannot be written to the run folder (%s), %s", error, effect
            )
            if self._shared is None:
                return False
        self._owned = new
        self._written = encoded
        return True

    def _has_drained(self, member: Member) -> bool:
        """Says whether a member has ended and only its agent remains until its Ray node ends
        (leave_node.py)."""
        has_ended = member.state == "draining" and not member.pid and member.since > 0
        return self._spec.on_nodes and has_ended

    def _forget_agent(self, member: Member) -> None:
        if (agent := self._agents.pop(member.agent_name, None)) is not None:
            ray.kill(agent)

    def _attach(self, member: Member) -> None:
        """Creates the member's agent, or connects to the existing one."""
        taken = dict(self._spec.resources(member.pool))
        actor = ray.remote(
            num_cpus=taken.pop("CPU", 0),
            num_gpus=taken.pop("GPU", 0),
            max_restarts=-1,
            lifetime="detached",
            resources=taken,
            label_selector=_on_host(self._spec, member.host),
        )(Agent)
        agent = actor.options(name=member.agent_name, get_if_exists=True).remote(self._spec, member)
        self._agents[member.agent_name] = agent
        # An agent that existed before reports only changes, so its current state is requested.
        if member.pid or member.leaves:
            threading.Thread(target=self._request_status, args=(agent,), daemon=True).start()

    def _request_status(self, agent: Any) -> None:
        try:
            self.report(*ray.get(agent.status.remote(), timeout=30))
        except ray.exceptions.RayError as error:
            log.warning(
                "the Ray actor that watches a process did not answer: %s. The state of the process "
                "is unknown until the actor reports a change",
                error,
            )

    def _take_report(
        self, agent_name: str, state: MemberState, process: Mapping[str, object]
    ) -> None:
        member = next((m for m in self._owned.members if m.agent_name == agent_name), None)
        if member is None or member.state == "lost":
            return
        if state == "gone":
            self._owned.members.remove(member)
            self._forget_agent(member)
            log.info("%s has ended", member.member_id)
            return
        if member.leaves and state != "draining":
            # Ray restarted the agent, and the new agent does not know that the process must drain.
            self._agents[agent_name].drain.remote()
            state = "draining"
        if (member.state, member.pid) != (state, process["pid"]):
            process = {**process, "since": time.time()}
        self._replace(member, state=state, **process)

    def _replace(self, member: Member, **changes: object) -> None:
        at = self._owned.members.index(member)
        self._owned.members[at] = msgspec.structs.replace(member, **changes)


class NodeRequests:
    """Requests nodes from Ray's autoscaler by the resources that the processes need.

    Ray keeps only the last request, and a new Ray head knows no request. So an unchanged request is
    repeated at intervals.
    """

    def __init__(self) -> None:
        self._last_bundles: list[tuple[dict[str, float], dict[str, str]]] = []
        self._requested_at = -_REPEAT_INTERVAL_S

    def request(self, bundles: Sequence[tuple[dict[str, float], dict[str, str]]]) -> None:
        """Requests nodes for all bundles of (resources, labels of the node). If Ray's head does not
        answer, the next call tries again."""
        bundles = list(bundles)
        now = time.monotonic()
        if bundles == self._last_bundles and now - self._requested_at < _REPEAT_INTERVAL_S:
            return
        if bundles != self._last_bundles:
            log.info("asking Ray's autoscaler for nodes for %d processes", len(bundles))
        try:
            request_resources(
                bundles=[dict(resources) for resources, _ in bundles],
                bundle_label_selectors=[dict(labels) for _, labels in bundles],
            )
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:
            log.warning("Ray's autoscaler cannot be asked for nodes: %s", error)
            return
        self._last_bundles = bundles
        self._requested_at = now


def _on_host(spec: ClusterSpec, host_id: str) -> dict[str, str] | None:
    """Builds Ray's label selector for the node of a host; None if there is only one machine."""
    label = NODE_LABEL if spec.on_nodes else HOST_LABEL
    return {label: host_id} if host_id else None


def _without_oldest_lost(members: list[Member]) -> list[Member]:
    """Removes the oldest lost members if there are more than _LOST_MAX. This limits the list if
    hosts never return."""
    lost = sorted((m for m in members if m.state == "lost"), key=lambda m: m.ordinal)
    forgotten = {m.ordinal for m in lost[:-_LOST_MAX]}
    return [m for m in members if m.ordinal not in forgotten]


def start_controller(spec: ClusterSpec) -> Any:
    """Creates the cluster's controller and returns its handle. The caller must be connected to Ray.

    The URL of Redis is not an argument, because it is a secret and Ray stores arguments. The
    controller reads it from the environment of its node.
    """
    actor = ray.remote(
        num_cpus=0,
        max_restarts=-1,
        lifetime="detached",
        label_selector=_on_host(spec, spec.host_id),
    )(PoolController)
    return actor.options(name=CONTROLLER_NAME).remote(spec)
