"""Decides which processes the pool controller starts and drains.

A member is one process of a pool, such as decode-0. A keeper keeps the process running and reports
the state of the member (processes/keeper.py). The controller itself sets the states "draining" and
"lost".

    state        meaning                                            next state
    pending      the keeper has not reported yet                     running or restarting
    running      the process runs                                    restarting, if the process ends
    restarting   the process has ended; the keeper starts it again   running
    draining     the process finishes its requests, then ends        gone
    gone         the process has ended                               none: the member is removed
    lost         the member's host does not answer                   pending, if the host is back

If a pool shrinks, members become draining. If a host is lost, all its members become lost. A lost
member keeps its name, because its process may still run: if decode-0 is lost, the member that
replaces it gets another name, such as decode-1.

A worker on a GPU is placed on a host whose GPUs have the fewest workers (gpus.py). Among equally
suitable hosts, one with a fast network path to the worker's peers is chosen (nearness.py).

With `ClusterSpec.on_nodes`, the hosts are nodes that Ray itself starts and ends, and a member takes
resources of its node. Members are packed on as few nodes as possible, so that other nodes become
idle and Ray can end them.

This module does not depend on Ray, processes or the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Literal

import msgspec

from tandem.cluster.gpus import least_used
from tandem.cluster.nearness import (
    PairBandwidths,
    bandwidths_to,
    far_hosts,
    far_reason,
    host_bandwidths,
)
from tandem.common.config.cluster import Pool, PoolName, group_of, pool_name, role_of

# What happens to the members of a host that wants to leave the cluster. leaves: new members start
# on other hosts, and the old members keep running. drains: the old members are drained.
Leave = Literal["leaves", "drains"]
MemberState = Literal["pending", "running", "restarting", "draining", "gone", "lost"]
# Order in which `plan` adds members. `grpc` is not listed, because `_follow_routers` adds a gRPC
# replica to each host with a router.
_IN_TURN: tuple[Pool, ...] = ("router", "decode", "prefill", "encode")
_PEERS: Mapping[Pool, Pool] = {"prefill": "decode", "decode": "prefill"}


class PoolCommand(msgspec.Struct, frozen=True):
    """The command line of a pool's processes. `filled` replaces its placeholders: {id}, {cores}
    and {NAME} for each name in `ports`, such as {http_port}."""

    command: list[str]
    # port name -> port number. Only the pool's first process on a host gets these ports. The system
    # chooses the ports of further processes on the host.
    ports: dict[str, int] = {}
    num_cores: int = 0  # number of cores to which each process is pinned; 0: it may use all cores
    # cuda: each process needs GPUs. auto: each process uses GPUs if the host has them.
    device: Literal["cpu", "auto", "cuda"] = "cpu"
    num_gpus: int = 1  # number of GPUs that each process needs, if it uses any
    # only with `on_nodes`: the Ray resources that one process of the pool takes, such as {"CPU": 4}
    resources: dict[str, float] = {}

    def filled(self, member: Member) -> list[str]:
        values = {
            "{id}": member.member_id,
            "{cores}": ",".join(map(str, member.cores)),
        }
        named = member.has_ports
        values |= {f"{{{name}}}": str(p if named else 0) for name, p in self.ports.items()}
        return [values.get(argument, argument) for argument in self.command]


class Host(msgspec.Struct, frozen=True):
    """A machine of the cluster. `host_id` is empty if the cluster has only one machine."""

    host_id: str
    cores: list[int]  # cores to which engines may be pinned, NUMA node by NUMA node
    labels: dict[str, str] = {}
    resources: dict[str, float] = {}  # only with `on_nodes`: all resources of the Ray node
    num_gpus: int = 0
    numa: list[int] = []  # number of cores of each NUMA node; empty: unknown

    @property
    def cores_by_node(self) -> list[list[int]]:
        ends = list(accumulate(self.numa)) or [len(self.cores)]
        return [self.cores[begin:end] for begin, end in pairwise([0, *ends])]


class ClusterSpec(msgspec.Struct, frozen=True):
    """The settings of the pool controller and the keepers: the pools, and the cores, labels and
    GPUs of one host. Each host has a spec of its own. Secrets are not in the spec but in the
    environment.

    With `on_nodes`, the hosts are nodes of a Ray cluster whose lifetime Tandem does not control.
    """

    cluster_id: str
    run_folder: str
    pools: dict[PoolName, PoolCommand]
    wanted: dict[PoolName, int]  # number of processes in each pool at the start of the cluster
    cores: list[int]  # cores to which engines may be pinned, NUMA node by NUMA node
    # A draining process is killed this many seconds after SIGTERM. Normally it ends earlier,
    # because its own drain deadline is shorter.
    drain_deadline_s: float = 45.0
    # seconds that a router still serves after it announced that it leaves, so that its clients can
    # switch to other routers
    leave_notice_s: float = 5.0
    host_id: str = ""
    labels: dict[str, str] = {}
    number: int = 0  # fencing number of the Ray head (head_lease.py); 0: no machine can join
    host_before: str = ""  # host on which the previous head ran, until that head lost the lease
    selectors: dict[
        PoolName, dict[str, str]
    ] = {}  # pool -> labels that a host of the pool must have
    on_nodes: bool = False
    requests_nodes: bool = False  # True: request missing nodes from Ray's autoscaler
    num_gpus: int = 0
    numa: list[int] = []  # number of cores of each NUMA node; empty: unknown
    workers_per_gpu: int | None = None  # largest number of workers on one GPU; None: no limit

    @property
    def host(self) -> Host:
        return Host(self.host_id, self.cores, self.labels, num_gpus=self.num_gpus, numa=self.numa)

    def resources(self, pool: PoolName) -> dict[str, float]:
        """The Ray resources that one process of a pool takes. By default, this is one unit of a
        resource with the name of the pool's role: {"decode": 1.0}."""
        return self.pools[pool].resources or {role_of(pool): 1.0}


class Member(msgspec.Struct, frozen=True):
    """One process of a pool, kept running by its keeper."""

    member_id: str  # pool and number, such as decode-0; the number of a gone member is reused
    pool: PoolName
    ordinal: int  # number of the member in the order of creation, never reused
    cores: list[int] = []  # cores to which the process is pinned; empty: it may use all cores
    state: MemberState = "pending"
    pid: int = 0
    num_starts: int = 0  # how often the process was restarted after it had ended
    # what the previous process logged about its failure (`process.last_warning`); empty: nothing
    last_line: str = ""
    # how the member's previous process ended, such as `exit status 1`; empty: unknown, or the first
    # process still runs
    ending: str = ""
    is_stopped: bool = False  # True: a signal such as SIGSTOP has stopped the process
    since: float = 0.0  # Unix time when the keeper first reported `state` and `pid`
    host: str = ""
    # True: the process gets the ports in `PoolCommand.ports`. False: the system chooses its ports.
    has_ports: bool = False
    # How often the member's host was lost and came back. The number is part of the keeper's name,
    # because the member gets a new keeper each time.
    num_losses: int = 0
    # why the member is not on another host (text of `far_reason`); empty: no host was far
    placed_why: str = ""
    gpus: list[int] = []  # indices of the worker's GPUs on the host

    @property
    def keeper_name(self) -> str:
        again = f"-{self.num_losses}" if self.num_losses else ""
        return f"{self.member_id}-{self.ordinal}{again}"

    @property
    def leaves(self) -> bool:
        return self.state in ("draining", "gone", "lost")

    @property
    def is_coming_back(self) -> bool:
        """True while the member's host is back and the new keeper has not reported yet."""
        return self.state == "pending" and self.num_losses > 0


def plan(
    spec: ClusterSpec,
    wanted: Mapping[PoolName, int],
    members: Sequence[Member],
    hosts: Sequence[Host] | None = None,
    leaving: Mapping[str, Leave] = MappingProxyType({}),
    measured: PairBandwidths = MappingProxyType({}),
) -> tuple[list[Member], list[Member]]:
    """Computes the members to add and the members to drain so that the pools reach their wanted
    sizes.

    `hosts` are the reachable hosts, by default the machine of the spec. A pool remains smaller than
    wanted while no host fits.

    `leaving` has the hosts that want to leave. New members on other hosts replace the members of a
    leaving host. The members of the leaving host are drained once its value is "drains".

    To balance hosts, a member of a pool moves if the host with the most members of the pool has at
    least two more than another host: with 3 and 1 members one moves, with 2 and 1 none does. Until
    the new member runs, the pool has one member too many.

    `measured` has the bandwidths between workers. It affects only which hosts get new members.

    New members are added in turns of one router, one decode worker, one prefill worker and one
    encode worker. The order matters because hosts may have too few GPUs. Decode comes before
    prefill because a decode worker can serve alone.
    """
    hosts = [spec.host] if hosts is None else hosts
    hosts = [host for host in hosts if host.host_id not in leaving]
    add: list[Member] = []
    drain = [m for m in members if not m.leaves and leaving.get(m.host) == "drains"]
    current = {
        pool: [m for m in members if m.pool == pool and not m.leaves and m.host not in leaving]
        for pool in _in_turn(spec)
    }
    missing = {pool: wanted.get(pool, 0) - len(found) for pool, found in current.items()}
    for number in range(max(missing.values(), default=0)):
        for pool in [pool for pool, num_missing in missing.items() if number < num_missing]:
            found = _host_for(spec, pool, [*members, *add], hosts, measured)
            if found is not None:
                add.append(_next_member(spec, pool, [*members, *add], *found))
    for pool, num_missing in missing.items():
        if num_missing < 0:
            leave = _surplus_on_nodes if spec.on_nodes else _surplus
            drain += leave(current[pool], -num_missing)
        elif (
            num_missing == 0
            and not spec.on_nodes
            and (found := _host_to_move_to(spec, pool, [*members, *add], hosts, measured))
        ):
            add.append(_next_member(spec, pool, [*members, *add], *found))
    if "grpc" in spec.pools:
        _follow_routers(spec, members, hosts, add, drain)
    return add, drain


def _in_turn(spec: ClusterSpec) -> list[PoolName]:
    """Returns the pools in the order in which `plan` adds members."""
    pools = [pool for pool in spec.pools if role_of(pool) in _IN_TURN]
    return sorted(pools, key=lambda pool: _IN_TURN.index(role_of(pool)))


def router_hosts(members: Sequence[Member]) -> set[str]:
    """Lists the hosts with a router that is not draining or lost. Each of these hosts also gets one
    gRPC replica."""
    return {m.host for m in members if m.pool == "router" and not m.leaves}


def node_bundles(
    spec: ClusterSpec, wanted: Mapping[PoolName, int], members: Sequence[Member]
) -> list[tuple[dict[str, float], dict[str, str]]]:
    """Lists what to request from Ray's autoscaler: (resources, labels of the node) for each wanted
    process.

    The list is empty once every wanted process has a node. Otherwise Ray would match the bundles to
    arbitrary nodes and keep these nodes although they are idle.
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
    """Changes the state of the members on these hosts to "lost". Returns only the changed
    members."""
    return [
        msgspec.structs.replace(m, state="lost", pid=0, is_stopped=False)
        for m in members
        if m.host in host_ids and m.state != "lost"
    ]


def revive(members: Sequence[Member], host_ids: Collection[str]) -> list[Member]:
    """Changes the state of lost members to "pending" if their host is back. Returns only the
    changed members. The caller creates new keepers for them."""
    return [
        msgspec.structs.replace(m, state="pending", num_losses=m.num_losses + 1)
        for m in members
        if m.host in host_ids and m.state == "lost"
    ]


def with_free_gpu(
    spec: ClusterSpec, pool: PoolName, members: Sequence[Member], hosts: list[Host]
) -> tuple[list[Host], str]:
    """Returns the hosts whose GPUs suit one more worker best, and "". If no host is suitable,
    returns an empty list and the reason.

    The best hosts are those that have a GPU with the fewest workers. For example, if each GPU of
    host A has a worker and one GPU of host B has none, only B is returned. If a worker needs
    several GPUs, the one of them with the most workers counts.

    If no host has enough GPUs, all hosts are returned for a pool whose workers can also run on
    CPUs. In a cluster of one machine, this machine is returned even if the pool needs a GPU,
    because it may have a GPU that was not found. If it has none, the worker itself reports the
    error.
    """
    device, needed = spec.pools[pool].device, spec.pools[pool].num_gpus
    gpus = _least_used_gpus(hosts, members, needed)
    if device == "cpu" or not (gpus or (device == "cuda" and spec.host_id)):
        return hosts, ""
    if not gpus:
        what = "a GPU" if needed == 1 else f"{needed} GPUs"
        return [], f"no host has {what} (or CUDA_VISIBLE_DEVICES names GPUs that do not exist)"
    fewest = min(uses for uses, _ in gpus.values())
    limit = spec.workers_per_gpu
    if limit is not None and fewest >= limit:
        total = sum(host.num_gpus for host in hosts)
        free = "no GPU is free" if needed == 1 else f"no host has {needed} free GPUs"
        return [], f"{free} ({total} in total, --workers-per-gpu {limit})"
    return [h for h in hosts if h.host_id in gpus and gpus[h.host_id][0] == fewest], ""


def _follow_routers(
    spec: ClusterSpec,
    members: Sequence[Member],
    hosts: Sequence[Host],
    add: list[Member],
    drain: list[Member],
) -> None:
    """Adds a gRPC replica on each host that has or gets a router but has no replica. Drains the
    replicas on hosts without a router. While a replica of a host drains, the host gets no new
    replica, because the draining one still uses the port."""
    leave = {m.ordinal for m in drain}
    routed = router_hosts([m for m in (*members, *add) if m.ordinal not in leave])
    replicas = [m for m in members if m.pool == "grpc" and m.state != "lost"]
    drain += [
        m for m in replicas if m.host not in routed and not m.leaves and m.ordinal not in leave
    ]
    free = [h for h in hosts if h.host_id in routed - {m.host for m in replicas}]
    for host in free:
        add.append(_next_member(spec, "grpc", [*members, *add], host, ""))


def _surplus(current: Sequence[Member], num_surplus: int) -> list[Member]:
    """Selects the members of a pool that leave, one after another: each time the newest member on
    the host with the most members.

    A running member is selected only if enough members still run without it. Otherwise the newest
    member on that host that does not run is selected. If all members on that host run, no further
    member leaves for now, because a new member on another host is still starting.

    A member whose host is back (`is_coming_back`) is not selected in place of a running one. Its
    process may run, and clients know its address.
    """
    left = list(current)
    for _ in range(num_surplus):
        by_host = Counter(m.host for m in left)
        crowded = [m for m in left if by_host[m.host] == max(by_host.values())]
        if sum(m.state == "running" for m in left) <= len(current) - num_surplus:
            crowded = [m for m in crowded if m.state != "running" and not m.is_coming_back]
        if not crowded:
            break
        left.remove(max(crowded, key=lambda m: m.ordinal))
    return [m for m in current if m not in left]


def _surplus_on_nodes(current: Sequence[Member], num_surplus: int) -> list[Member]:
    """Selects the members that leave: first those that are not running, then those on the node with
    the fewest members."""
    by_host = Counter(m.host for m in current)
    order = sorted(current, key=lambda m: (m.state == "running", by_host[m.host], -m.ordinal))
    leave = {m.ordinal for m in order[:num_surplus]}
    return [m for m in current if m.ordinal in leave]


def _host_to_move_to(
    spec: ClusterSpec,
    pool: PoolName,
    members: Sequence[Member],
    hosts: Sequence[Host],
    measured: PairBandwidths,
) -> tuple[Host, str] | None:
    """Finds a host to which a member of the pool should move (see `plan`). Returns the host and
    the text about far hosts (`_host_for`); None if the members are balanced or one of them does
    not run. A member on a GPU moves only to an unused GPU."""
    current = [m for m in members if m.pool == pool and m.state != "lost"]
    if any(m.state != "running" for m in current):
        return None
    found = _host_for(spec, pool, members, hosts, measured)
    by_host = Counter(m.host for m in current)
    if found is None or max(by_host.values(), default=0) < by_host[found[0].host_id] + 2:
        return None
    gpus = _gpus_for(spec, pool, members, found[0])
    return None if any(uses for uses, _ in gpus.values()) else found


def _host_for(
    spec: ClusterSpec,
    pool: PoolName,
    members: Sequence[Member],
    hosts: Sequence[Host],
    measured: PairBandwidths,
) -> tuple[Host, str] | None:
    """Chooses a host for one more member of this pool. Returns the host and a text about the hosts
    that were not chosen because they are far (nearness.py); None if no host fits.

    Of the hosts that fit and are not far, the one with the fewest members of all pools is chosen.
    With `on_nodes`, it is the one with the most members, so that other nodes become idle.
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
    spec: ClusterSpec, pool: PoolName, members: Sequence[Member], hosts: Sequence[Host]
) -> list[Host]:
    """Returns the hosts that have the labels of the pool and the fewest members of the pool.
    Members are spread in this way so that the loss of one host does not take a whole pool.

    If machines can join, each host gets at most one process of a pool with fixed ports. With
    `on_nodes`, a host needs the labels and free resources, and pools are not spread over hosts.
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
    pool: PoolName, members: Sequence[Member], hosts: list[Host], measured: PairBandwidths
) -> tuple[list[Host], str]:
    """Returns the hosts that are not far from the pool's peers, and a text about the far hosts.

    Prefill and decode workers are peers. A peer without an entry in `measured` is ignored.
    """
    if len(hosts) < 2 or role_of(pool) not in _PEERS:
        return hosts, ""
    of_peers = pool_name(group_of(pool), _PEERS[role_of(pool)])
    current = [m for m in members if not m.leaves]
    peers = [m.host for m in current if m.pool == of_peers and m.member_id in measured]
    between = host_bandwidths(measured, {m.member_id: m.host for m in current})
    bandwidths = bandwidths_to(peers, [host.host_id for host in hosts], between)
    if not (far := far_hosts(bandwidths)):
        return hosts, ""
    near = [host for host in hosts if host.host_id not in far]
    return near, far_reason(far, bandwidths, of_peers)


def _has_room(spec: ClusterSpec, pool: PoolName, members: Sequence[Member], host: Host) -> bool:
    """Says whether a node has resources for one more member. A draining member still uses its
    resources."""
    free = Counter(host.resources)
    for member in members:
        if member.host == host.host_id and member.state not in ("gone", "lost"):
            free.subtract(spec.resources(member.pool))
    return all(free[name] >= amount for name, amount in spec.resources(pool).items())


def _next_member(
    spec: ClusterSpec, pool: PoolName, members: Sequence[Member], host: Host, placed_why: str
) -> Member:
    taken = {m.member_id for m in members}
    number = next(n for n in range(len(taken) + 1) if f"{pool}-{n}" not in taken)
    ordinal = 1 + max((m.ordinal for m in members), default=-1)
    cores = _least_used_cores(host, members, spec.pools[pool].num_cores)
    gpus = _gpus_for(spec, pool, members, host)
    first = not any(m.has_ports for m in members if (m.pool, m.host) == (pool, host.host_id))
    return Member(
        member_id=f"{pool}-{number}",
        pool=pool,
        ordinal=ordinal,
        cores=cores,
        host=host.host_id,
        has_ports=bool(spec.pools[pool].ports) and first,
        placed_why=placed_why,
        gpus=gpus[host.host_id][1] if gpus else [],
    )


def _gpus_for(
    spec: ClusterSpec, pool: PoolName, members: Sequence[Member], host: Host
) -> dict[str, tuple[int, list[int]]]:
    """Finds the GPUs of a host for one more member of a pool, as `_least_used_gpus` does."""
    command = spec.pools[pool]
    if command.device == "cpu":
        return {}
    return _least_used_gpus([host], members, command.num_gpus)


def _least_used_gpus(
    hosts: Sequence[Host], members: Sequence[Member], num_wanted: int
) -> dict[str, tuple[int, list[int]]]:
    """Finds the `num_wanted` least used GPUs of each host that has as many. Returns host id ->
    (largest number of workers on one of them, indices of the GPUs). A draining worker counts,
    because it holds GPU memory until it ends."""
    current = [m for m in members if m.state not in ("gone", "lost")]
    used = [(m.host, gpu) for m in current for gpu in m.gpus]
    return least_used({host.host_id: host.num_gpus for host in hosts}, used, num_wanted)


def _least_used_cores(host: Host, members: Sequence[Member], num: int) -> list[int]:
    """Chooses the least used cores for one more member, of one NUMA node unless others are used
    less. If the host has fewer than `num` cores, the member may use all of them."""
    current = [m for m in members if m.host == host.host_id and not m.leaves]
    uses = Counter(core for member in current for core in member.cores)
    found = [
        sorted(cores, key=lambda core: uses[core])[:num]
        for cores in (*host.cores_by_node, host.cores)
        if len(cores) >= num
    ]
    return sorted(min(found, key=lambda cores: sum(uses[core] for core in cores), default=[]))
