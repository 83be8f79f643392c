"""Decisions of the pool controller: pure functions from the wanted and the actual pools.

    Member: planned -> starting -> running <-> restarting        (its agent's reports)
               any of them, when the pool shrinks: draining -> gone, and the member is removed
               any of them, when its host is lost: lost -> pending, if that host comes back

A lost member keeps its name, because its process may still run. Its successor gets another name.

A worker on a GPU goes to a host whose GPUs have the fewest workers (gpus.py). If several hosts are
equally suitable, it goes to one that is near its peers (nearness.py).

With `ClusterSpec.on_nodes`, Ray starts and ends its nodes itself, and a member takes resources of
its node. Members share nodes as long as they fit, so that other nodes become idle.

This module knows no Ray, no process and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from tandem.cluster.gpus import least_used
from tandem.cluster.nearness import (
    PairBandwidths,
    bandwidths_to,
    far_hosts,
    host_bandwidths,
    told_far,
)
from tandem.common.config.cluster import Pool

Leave = Literal["leaves", "drains"]  # a host's members are replaced; they are also drained
MemberState = Literal["pending", "running", "restarting", "draining", "gone", "lost"]
_IN_TURN: tuple[Pool, ...] = ("router", "decode", "prefill")  # "grpc" follows "router"
_PEERS: Mapping[Pool, Pool] = {"prefill": "decode", "decode": "prefill"}


class PoolCommand(msgspec.Struct, frozen=True):
    """The command of a pool's processes; `{id}`, `{core}` and `{NAME}` of a port are filled in."""

    command: list[str]
    ports: dict[str, int] = {}  # for one process on each host; others get 0: the system chooses
    pinned: bool = False  # whether its engine is pinned to a core
    device: Literal["cpu", "auto", "cuda"] = "cpu"  # cuda needs a GPU; auto takes one if any exist
    resources: dict[str, float] = {}  # of its node that one process takes, with `on_nodes`

    def filled(self, member: Member) -> list[str]:
        values = {
            "{id}": member.member_id,
            "{core}": "" if member.core is None else str(member.core),
        }
        named = member.has_ports
        values |= {f"{{{name}}}": str(p if named else 0) for name, p in self.ports.items()}
        return [values.get(argument, argument) for argument in self.command]


class Host(msgspec.Struct, frozen=True):
    """A machine of the cluster. `host_id` is empty where there is only one."""

    host_id: str
    cores: list[int]  # that engines may be pinned to
    labels: dict[str, str] = {}
    resources: dict[str, float] = {}  # of a node of Ray, with `on_nodes`
    num_gpus: int = 0


class ClusterSpec(msgspec.Struct, frozen=True):
    """The processes of one machine. Secrets are not here but in the environment.

    With `on_nodes` the machines are the nodes of a Ray cluster that Tandem neither starts nor ends.
    """

    cluster_id: str
    run_folder: str
    pools: dict[Pool, PoolCommand]
    wanted: dict[Pool, int]  # at the start
    cores: list[int]  # that engines may be pinned to
    drain_deadline_s: float = 45.0  # longer than a worker or a router drains itself
    leave_notice_s: float = 5.0  # a router still serves while its clients learn that it leaves
    host_id: str = ""
    labels: dict[str, str] = {}
    number: int = 0  # the fencing number of this head; 0 if no machine can join
    host_before: str = ""  # the host of the head before, whose lease expired
    selectors: dict[Pool, dict[str, str]] = {}  # labels that a host of this pool must have
    on_nodes: bool = False
    requests_nodes: bool = False  # whether to request missing nodes from Ray's autoscaler
    num_gpus: int = 0
    workers_per_gpu: int | None = None  # at most; None: any number

    @property
    def host(self) -> Host:
        return Host(self.host_id, self.cores, self.labels, num_gpus=self.num_gpus)

    def resources(self, pool: Pool) -> dict[str, float]:
        """Returns the resources of its node that one process of a pool takes: by default one unit
        of a resource with the pool's name."""
        return self.pools[pool].resources or {pool: 1.0}


class Member(msgspec.Struct, frozen=True):
    """One process of a pool, and the agent that keeps it running."""

    member_id: str  # such as decode-0, with the lowest free number
    pool: Pool
    ordinal: int  # grows with each member made: the newest has the highest
    core: int | None = None
    state: MemberState = "pending"
    pid: int = 0
    num_starts: int = 0  # restarts: starts after the process had ended
    last_line: str = ""  # of the log of the process that ended
    ending: str = ""  # how that process ended
    is_stopped: bool = False  # whether its process is stopped, as by SIGSTOP
    since: float = 0.0  # seconds since the Unix epoch: when its agent reported this state
    host: str = ""
    has_ports: bool = False  # whether it gets the ports that its pool's command names
    num_losses: int = 0  # of its host; each new agent has another name
    placed_why: str = ""  # the hosts that were left out because they are far; empty: none
    gpu: int | None = None  # of its host

    @property
    def agent_name(self) -> str:
        again = f"-{self.num_losses}" if self.num_losses else ""
        return f"agent-{self.member_id}-{self.ordinal}{again}"

    @property
    def leaves(self) -> bool:
        return self.state in ("draining", "gone", "lost")

    @property
    def is_coming_back(self) -> bool:
        """Returns whether its host is back and its new agent has not reported yet."""
        return self.state == "pending" and self.num_losses > 0


def plan(
    spec: ClusterSpec,
    wanted: Mapping[Pool, int],
    members: Sequence[Member],
    hosts: Sequence[Host] | None = None,
    leaving: Mapping[str, Leave] = MappingProxyType({}),
    measured: PairBandwidths = MappingProxyType({}),
) -> tuple[list[Member], list[Member]]:
    """Returns (members to add, members to drain) so that the pools get their wanted sizes.

    `hosts` are the hosts that answer, by default the machine of the spec. A pool stays smaller than
    wanted while no host fits. Members on a `leaving` host are replaced. They stay until the host's
    state is "drains". A member moves to a host that has two fewer of its pool; the pool is larger
    by one until the new member runs. `measured` affects only the hosts of members, not their
    number. Pools take turns, in which decode comes before prefill: Ray starts agents one by one,
    hosts may have too few GPUs, and a decode worker alone can serve.
    """
    hosts = [spec.host] if hosts is None else hosts
    hosts = [host for host in hosts if host.host_id not in leaving]
    add: list[Member] = []
    drain = [m for m in members if not m.leaves and leaving.get(m.host) == "drains"]
    there = {
        pool: [m for m in members if m.pool == pool and not m.leaves and m.host not in leaving]
        for pool in _IN_TURN
    }
    missing = {pool: wanted.get(pool, 0) - len(found) for pool, found in there.items()}
    for number in range(max(missing.values())):
        for pool in [pool for pool, num_missing in missing.items() if number < num_missing]:
            found = _host_for(spec, pool, [*members, *add], hosts, measured)
            if found is not None:
                add.append(_next_member(spec, pool, [*members, *add], *found))
    for pool in _IN_TURN:
        if missing[pool] < 0:
            leave = _surplus_on_nodes if spec.on_nodes else _surplus
            drain += leave(there[pool], -missing[pool])
        elif (
            missing[pool] == 0
            and pool in spec.pools
            and not spec.on_nodes
            and (found := _host_to_move_to(spec, pool, [*members, *add], hosts, measured))
        ):
            add.append(_next_member(spec, pool, [*members, *add], *found))
    if "grpc" in spec.pools:
        _follow_routers(spec, members, hosts, add, drain)
    return add, drain


def router_hosts(members: Sequence[Member]) -> set[str]:
    """Returns the hosts with a router that stays, each of which has one gRPC replica, too."""
    return {m.host for m in members if m.pool == "router" and not m.leaves}


def node_bundles(
    spec: ClusterSpec, wanted: Mapping[Pool, int], members: Sequence[Member]
) -> list[tuple[dict[str, float], dict[str, str]]]:
    """Returns the (resources, labels) that Ray's nodes must have for each wanted process.

    The list is empty while every wanted process is on its node, which keeps that node. Otherwise
    Ray would match the request with any nodes, and idle ones would stay.
    """
    placed = Counter(m.pool for m in members if not m.leaves and m.state != "pending")
    if all(placed[pool] >= wanted.get(pool, 0) for pool in spec.pools):
        return []
    return [
        (spec.resources(pool), spec.selectors.get(pool, {}))
        for pool in spec.pools
        for _ in range(wanted.get(pool, 0))
    ]


def lose(members: Sequence[Member], host_ids: Collection[str]) -> list[Member]:
    """Returns the members on these hosts, in the state "lost"."""
    return [
        msgspec.structs.replace(m, state="lost", pid=0, is_stopped=False)
        for m in members
        if m.host in host_ids and m.state != "lost"
    ]


def revive(members: Sequence[Member], host_ids: Collection[str]) -> list[Member]:
    """Returns the lost members whose host is back, in their new state. Each gets a new agent."""
    return [
        msgspec.structs.replace(m, state="pending", num_losses=m.num_losses + 1)
        for m in members
        if m.host in host_ids and m.state == "lost"
    ]


def with_free_gpu(
    spec: ClusterSpec, pool: Pool, members: Sequence[Member], hosts: list[Host]
) -> tuple[list[Host], str]:
    """Returns the hosts whose least used GPU has the fewest workers, and why there is none.

    Without any GPU, all hosts fit a pool that needs none. They also fit a cluster of one machine,
    where the count may have missed a GPU and the worker itself reports a missing one.
    """
    device = spec.pools[pool].device
    gpus = _least_used_gpus(hosts, members)
    if device == "cpu" or not (gpus or (device == "cuda" and spec.host_id)):
        return hosts, ""
    if not gpus:
        return [], "no host has a GPU (CUDA_VISIBLE_DEVICES can name GPUs that are not found)"
    fewest = min(uses for uses, _ in gpus.values())
    limit = spec.workers_per_gpu
    if limit is not None and fewest >= limit:
        total = sum(host.num_gpus for host in hosts)
        return [], f"no GPU is free ({total} in all, --workers-per-gpu {limit})"
    return [h for h in hosts if h.host_id in gpus and gpus[h.host_id][0] == fewest], ""


def _follow_routers(
    spec: ClusterSpec,
    members: Sequence[Member],
    hosts: Sequence[Host],
    add: list[Member],
    drain: list[Member],
) -> None:
    """Adds a gRPC replica on each of these hosts that gets or has a router and no replica, and
    drains those on hosts without a router. One that drains still holds the port."""
    leave = {m.ordinal for m in drain}
    routed = router_hosts([m for m in (*members, *add) if m.ordinal not in leave])
    replicas = [m for m in members if m.pool == "grpc" and m.state != "lost"]
    drain += [
        m for m in replicas if m.host not in routed and not m.leaves and m.ordinal not in leave
    ]
    free = [h for h in hosts if h.host_id in routed - {m.host for m in replicas}]
    for host in free:
        add.append(_next_member(spec, "grpc", [*members, *add], host, ""))


def _surplus(there: Sequence[Member], num_surplus: int) -> list[Member]:
    """Returns the members of a pool that leave: the newest of the host with the most of them.

    A running member stays until as many others run as are to remain. Meanwhile a member of its host
    that does not run leaves instead, or none does: a new member on another host is starting. A
    member whose host is back stays until its agent reports: its process may run, and clients know
    its address.
    """
    left = list(there)
    for _ in range(num_surplus):
        by_host = Counter(m.host for m in left)
        crowded = [m for m in left if by_host[m.host] == max(by_host.values())]
        if sum(m.state == "running" for m in left) <= len(there) - num_surplus:
            crowded = [m for m in crowded if m.state != "running" and not m.is_coming_back]
        if not crowded:
            break
        left.remove(max(crowded, key=lambda m: m.ordinal))
    return [m for m in there if m not in left]


def _surplus_on_nodes(there: Sequence[Member], num_surplus: int) -> list[Member]:
    """Returns the members that leave: first those that do not run, then those of the node with the
    fewest members."""
    by_host = Counter(m.host for m in there)
    order = sorted(there, key=lambda m: (m.state == "running", by_host[m.host], -m.ordinal))
    leave = {m.ordinal for m in order[:num_surplus]}
    return [m for m in there if m.ordinal in leave]


def _host_to_move_to(
    spec: ClusterSpec,
    pool: Pool,
    members: Sequence[Member],
    hosts: Sequence[Host],
    measured: PairBandwidths,
) -> tuple[Host, str] | None:
    """Returns the host to which a member should move in a pool that has its size but is not spread
    evenly. A member on a GPU moves only to a GPU that no other one uses."""
    there = [m for m in members if m.pool == pool and m.state != "lost"]
    if any(m.state != "running" for m in there):
        return None
    found = _host_for(spec, pool, members, hosts, measured)
    by_host = Counter(m.host for m in there)
    if found is None or max(by_host.values(), default=0) < by_host[found[0].host_id] + 2:
        return None
    gpus = {} if spec.pools[pool].device == "cpu" else _least_used_gpus([found[0]], members)
    return None if any(uses for uses, _ in gpus.values()) else found


def _host_for(
    spec: ClusterSpec,
    pool: Pool,
    members: Sequence[Member],
    hosts: Sequence[Host],
    measured: PairBandwidths,
) -> tuple[Host, str] | None:
    """Returns a host for one more member of this pool, and a text about hosts that were left out.

    Hosts that are far from the pool's peers are left out. Of the others that fit, the one with the
    fewest members is chosen or, on the nodes of Ray, the one with the most.
    """
    fits = _fits(spec, pool, members, hosts)
    fits, why = _without_far(pool, members, fits, measured)
    if not fits:
        return None
    if spec.on_nodes:
        on_host = Counter(m.host for m in members if m.state not in ("gone", "lost"))
        return max(fits, key=lambda host: on_host[host.host_id]), why
    of_all = Counter(m.host for m in members if not m.leaves)
    return min(fits, key=lambda host: of_all[host.host_id]), why


def _fits(
    spec: ClusterSpec, pool: Pool, members: Sequence[Member], hosts: Sequence[Host]
) -> list[Host]:
    """Returns the hosts that have the pool's labels and the fewest of its members: the loss of one
    host must not take a whole pool.

    If machines can join, each has at most one process of a pool whose command names ports. A node
    of Ray must have room, and pools are not spread over nodes.
    """
    needs = spec.selectors.get(pool, {}).items()
    fits = [host for host in hosts if needs <= host.labels.items()]
    if spec.on_nodes:
        return [host for host in fits if _has_room(spec, pool, members, host)]
    if spec.host_id and spec.pools[pool].ports:
        taken = {m.host for m in members if m.pool == pool and m.state != "lost"}
        fits = [host for host in fits if host.host_id not in taken]
    fits, _ = with_free_gpu(spec, pool, members, fits)
    of_pool = Counter(m.host for m in members if m.pool == pool and not m.leaves)
    fewest = min((of_pool[host.host_id] for host in fits), default=0)
    return [host for host in fits if of_pool[host.host_id] == fewest]


def _without_far(
    pool: Pool, members: Sequence[Member], hosts: list[Host], measured: PairBandwidths
) -> tuple[list[Host], str]:
    """Returns the hosts that are not far from the pool's peers, and a text about the others.

    A peer counts as soon as it has a record, and thereby an entry in `measured`.
    """
    if len(hosts) < 2 or pool not in _PEERS:
        return hosts, ""
    there = [m for m in members if not m.leaves]
    peers = [m.host for m in there if m.pool == _PEERS[pool] and m.member_id in measured]
    between = host_bandwidths(measured, {m.member_id: m.host for m in there})
    bandwidths = bandwidths_to(peers, [host.host_id for host in hosts], between)
    if not (far := far_hosts(bandwidths)):
        return hosts, ""
    near = [host for host in hosts if host.host_id not in far]
    return near, told_far(far, bandwidths, _PEERS[pool])


def _has_room(spec: ClusterSpec, pool: Pool, members: Sequence[Member], host: Host) -> bool:
    """Returns whether a node has resources for one more member. A draining member keeps its own."""
    free = Counter(host.resources)
    for member in members:
        if member.host == host.host_id and member.state not in ("gone", "lost"):
            free.subtract(spec.resources(member.pool))
    return all(free[name] >= amount for name, amount in spec.resources(pool).items())


def _next_member(
    spec: ClusterSpec, pool: Pool, members: Sequence[Member], host: Host, placed_why: str
) -> Member:
    taken = {m.member_id for m in members}
    number = next(n for n in range(len(taken) + 1) if f"{pool}-{n}" not in taken)
    ordinal = 1 + max((m.ordinal for m in members), default=-1)
    core = _least_used_core(host, members) if spec.pools[pool].pinned else None
    gpus = {} if spec.pools[pool].device == "cpu" else _least_used_gpus([host], members)
    first = not any(m.has_ports for m in members if (m.pool, m.host) == (pool, host.host_id))
    return Member(
        member_id=f"{pool}-{number}",
        pool=pool,
        ordinal=ordinal,
        core=core,
        host=host.host_id,
        has_ports=bool(spec.pools[pool].ports) and first,
        placed_why=placed_why,
        gpu=gpus[host.host_id][1] if gpus else None,
    )


def _least_used_gpus(
    hosts: Sequence[Host], members: Sequence[Member]
) -> dict[str, tuple[int, int]]:
    """Returns (number of workers, index) of the least used GPU of each host that has GPUs. A
    draining worker counts, because it holds GPU memory until it ends."""
    there = [m for m in members if m.state not in ("gone", "lost")]
    used = [(m.host, m.gpu) for m in there if m.gpu is not None]
    return least_used({host.host_id: host.num_gpus for host in hosts}, used)


def _least_used_core(host: Host, members: Sequence[Member]) -> int | None:
    """Returns a core for one more member: a free one if there is one, else the least used."""
    uses = Counter(m.core for m in members if m.host == host.host_id and not m.leaves)
    return min(host.cores, key=lambda core: uses[core], default=None)
