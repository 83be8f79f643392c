"""The pool controller, which brings each pool to its wanted size.

  python -m tandem.cluster.ray.controller GCS_ADDRESS NODE_ADDRESS

The program runs the controller of `tandem up` and `tandem join` on the head's host. It reads the
spec from the first line of standard input, prints `READY`, and ends with its standard input.
head.py starts it, and starts it again when it ends. `tandem controller` runs the controller in its
own process.

Only one thread changes the state. It handles one event at a time: a scale request from Redis, a
report about a process, or a change of the hosts. After each event it compares wanted and actual
pools (`pools.plan`), writes the new state to a file, has processes kept running or drained, and
publishes the state of the pools in Redis. A controller that was started again reads the file, and
finds the agents by name.

The controller keeps the processes of its own host running itself (processes/keeper.py), and those
of other hosts by agents (agent.py). So a cluster of one machine has no Ray actor. Its controller
does not even import Ray: an idle connection to Ray would take 0.3% of a core and 30 MB.

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
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.cluster.pool_state import describe, gpu_waits
from tandem.cluster.pools import (
    ClusterSpec,
    Leave,
    Member,
    lose,
    node_bundles,
    plan,
    revive,
)
from tandem.cluster.processes import owned
from tandem.cluster.processes.keeper import Keepers, Report
from tandem.cluster.processes.owned import Owned, SharedOwned
from tandem.cluster.processes.vital_thread import start_vital
from tandem.cluster.ray.host_watch import HostWatch
from tandem.cluster.ray.node import HOST_LABEL, NAMESPACE, NODE_LABEL
from tandem.cluster.ray.scale_channel import ScaleChannel
from tandem.common.config.cluster import REDIS_URL_VARIABLE, PoolName
from tandem.common.pool_sizes import check_sizes, sized_pools
from tandem.net.observability.logs import configure_logging
from tandem.net.store.client import UNREACHABLE

if TYPE_CHECKING:
    from tandem.cluster.ray.agent import RemoteAgent

log = logging.getLogger(__name__)

READY = b"ready\n"
_EVENTS_MAX = 10_000
_LOST_MAX = 100
_REPEAT_INTERVAL_S = 20.0  # seconds after which an unchanged request for nodes is sent again
_RETRY_S = 2.0  # seconds between two attempts to write the state


class PoolController:
    """Brings the pools of one cluster to their wanted sizes, in threads of its own."""

    def __init__(self, spec: ClusterSpec) -> None:
        """Starts the controller. If machines can join, or with `spec.on_nodes`, the process must be
        connected to Ray."""
        self._spec = spec
        self._run_folder = Path(spec.run_folder)
        redis_url = os.environ[REDIS_URL_VARIABLE]
        self._shared: SharedOwned | None = None
        if spec.number:
            self._shared = SharedOwned(redis_url, spec.cluster_id, spec.number)
        self._owned = self._read() or Owned(dict(spec.wanted), [])
        self._leaving: dict[str, Leave] = {}
        self._waits: dict[PoolName, str] = {}
        self._written = b""
        self._published: dict[str, object] = {}
        # Keeps processes running: host id -> the keepers of this host, or the agent of another
        # one. With `on_nodes`: keeper's name -> its agent.
        self._agents: dict[str, Keepers | RemoteAgent] = {}
        if not spec.on_nodes:
            self._agents[spec.host_id] = Keepers(spec, self._report)
        self._events: queue.Queue[Callable[[], None]] = queue.Queue(_EVENTS_MAX)
        self._channel = ScaleChannel(
            redis_url, spec.cluster_id, self.scale, spec.pools, number=spec.number
        )
        own = None if spec.on_nodes else spec.host
        expected = [] if spec.on_nodes else self._owned.hosts
        self._hosts = HostWatch(own, spec.host_before, expected)
        self._nodes = NodeRequests()
        start_vital("pools", self._run)

    def scale(self, sizes: object) -> None:
        """Sets the wanted sizes of the pools in `sizes`. Raises BadRequest that names the allowed
        sizes."""
        checked = check_sizes(sizes, sized_pools(self._spec.pools))
        checked = {pool: size for pool, size in checked.items() if pool in self._spec.pools}
        self._events.put(lambda: self._owned.wanted.update(checked))

    def _report(self, report: Report) -> None:
        """Queues a keeper's report about its process."""
        self._events.put(lambda: self._take_report(report))

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
            # If this controller was started again, the host of the previous head may have joined.
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
        # The state is written before processes are started or drained. A controller that is started
        # again must find each agent in the state. An agent that is restarted must find in the state
        # which processes are not wanted any more.
        ended = {m.ordinal for m in lost} & {m.ordinal for m in members if self._has_drained(m)}
        kept = _without_oldest_lost([m for m in (*planned, *add) if m.ordinal not in ended])
        if not self._write(Owned(self._owned.wanted, kept, self._spec.number, self._hosts.known())):
            return False
        for member in lost:
            log.warning(
                "%s is lost, because its host %s does not answer", member.member_id, member.host
            )
            self._end_own_agent(member)
        for member in drain:
            log.info("draining %s", member.member_id)
            self._drain(member)
        for member in (*back, *add):
            where = f" on host {member.host}" if member.host else ""
            why = f", because {member.placed_why}" if member.placed_why else ""
            log.info("adding %s%s%s", member.member_id, where, why)
            self._attach(member)
        self._end_unused_agents()
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

    def _agent_key(self, member: Member) -> str:
        return member.keeper_name if self._spec.on_nodes else member.host

    def _attach(self, member: Member) -> None:
        """Has the member's process kept running by this host or its own. Creates the agent that
        this needs, or connects to the existing one."""
        key = self._agent_key(member)
        if key not in self._agents:
            from tandem.cluster.ray.agent import RemoteAgent

            on_nodes = self._spec.on_nodes
            self._agents[key] = RemoteAgent(
                f"keeper-{key}",
                self._spec,
                member if on_nodes else None,
                # An older version gave each member an agent with this name, with other methods.
                replaces=f"agent-{member.keeper_name}",
                resources=self._spec.resources(member.pool) if on_nodes else {},
                labels={NODE_LABEL if on_nodes else HOST_LABEL: member.host},
                post=self._events.put,
                report=self._take_report,
            )
        self._agents[key].keep(member)

    def _drain(self, member: Member) -> None:
        if (agent := self._agents.get(self._agent_key(member))) is not None:
            agent.drain(member.keeper_name)

    def _end_own_agent(self, member: Member) -> None:
        """Ends the agent of a member that has one of its own. The agent of a host remains: if the
        host is lost, Ray starts the agent again once the host is back."""
        if self._spec.on_nodes:
            agent = self._agents.pop(self._agent_key(member), None)
            if agent is not None and not isinstance(agent, Keepers):
                agent.end()

    def _end_unused_agents(self) -> None:
        """Ends the agents of hosts that have left. Ray would otherwise wait for these hosts."""
        if not self._spec.on_nodes:
            used = {m.host for m in self._owned.members} | self._hosts.alive.keys()
            for host in self._agents.keys() - used:
                agent = self._agents[host]
                if not isinstance(agent, Keepers):
                    agent.end()
                    del self._agents[host]

    def _take_report(self, report: Report) -> None:
        members = self._owned.members
        member = next((m for m in members if m.keeper_name == report.keeper_name), None)
        if member is None or member.state == "lost":
            return
        if report.state == "gone":
            members.remove(member)
            self._end_own_agent(member)
            log.info("%s has ended", member.member_id)
            return
        if member.leaves and report.state != "draining":
            # The agent was restarted, and does not know that the process must drain.
            self._drain(member)
            report = msgspec.structs.replace(report, state="draining")
        changes = msgspec.structs.asdict(report)
        del changes["keeper_name"]
        if (member.state, member.pid) != (report.state, report.pid):
            changes["since"] = time.time()
        members[members.index(member)] = msgspec.structs.replace(member, **changes)


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
        from ray.autoscaler.sdk import request_resources
        from ray.exceptions import RayError

        if bundles != self._last_bundles:
            log.info("asking Ray's autoscaler for nodes for %d processes", len(bundles))
        try:
            request_resources(
                bundles=[dict(resources) for resources, _ in bundles],
                bundle_label_selectors=[dict(labels) for _, labels in bundles],
            )
        except (RayError, RuntimeError, OSError) as error:
            log.warning("Ray's autoscaler cannot be asked for nodes: %s", error)
            return
        self._last_bundles = bundles
        self._requested_at = now


def _without_oldest_lost(members: list[Member]) -> list[Member]:
    """Removes the oldest lost members if there are more than _LOST_MAX. This limits the list if
    hosts never return."""
    lost = sorted((m for m in members if m.state == "lost"), key=lambda m: m.ordinal)
    forgotten = {m.ordinal for m in lost[:-_LOST_MAX]}
    return [m for m in members if m.ordinal not in forgotten]


def main(gcs_address: str, node_address: str) -> None:
    configure_logging("pool-controller")
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClusterSpec)
    if spec.number:  # machines can join
        import ray

        ray.init(
            address=gcs_address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=node_address,
        )
    PoolController(spec)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()  # returns when the process that started this one has ended
    os._exit(0)  # at once, so that this controller does nothing beside the next one


if __name__ == "__main__":
    main(*sys.argv[1:])
