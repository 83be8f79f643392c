"""Describes the pools for operators: the processes of each pool, and why a pool is smaller than
wanted.

Like pools.py, this module does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import get_args

from tandem.cluster.pools import ClusterSpec, Host, Leave, Member, router_hosts, with_free_gpu
from tandem.common.config.cluster import SIZED_POOLS, Pool, PoolName, group_of, role_of


def describe(
    wanted: Mapping[PoolName, int],
    members: Sequence[Member],
    pools: Collection[PoolName] = SIZED_POOLS,
    waits: Mapping[PoolName, str] = MappingProxyType({}),
) -> dict[str, object]:
    """Builds the state of these pools as stored in Redis and returned by `/v1/cluster`. `waits` has
    the reasons why pools are smaller than wanted."""
    return {
        pool: {
            # Operators cannot set the number of gRPC replicas: each host with a router has one.
            **(
                {"replicas": len(router_hosts(members))}
                if pool == "grpc"
                else {"wanted": wanted.get(pool, 0)}
            ),
            "running": sum(m.pool == pool and m.state == "running" for m in members),
            "agents": [
                {
                    "id": m.member_id,
                    "state": m.state,
                    "pid": m.pid,
                    "core": m.cores[0] if m.cores else None,
                    "starts": m.num_starts,
                    "last_line": m.last_line,
                    "exit": m.ending,
                    "is_stopped": m.is_stopped,
                    "since": m.since,
                    **({"gpus": m.gpus} if m.gpus else {}),
                    **({"host": m.host} if m.host else {}),
                    **({"placed_why": m.placed_why} if m.placed_why else {}),
                }
                for m in members
                if m.pool == pool
            ],
            **({"waits_why": waits[pool]} if pool in waits else {}),
        }
        for pool in _in_order(pools)
    }


def _in_order(pools: Collection[PoolName]) -> list[PoolName]:
    """Sorts pools: those of the first model come first, and routers before workers."""
    roles = get_args(Pool)
    return sorted(pools, key=lambda pool: (group_of(pool), roles.index(role_of(pool))))


def gpu_waits(
    spec: ClusterSpec,
    wanted: Mapping[PoolName, int],
    members: Sequence[Member],
    hosts: Sequence[Host],
    leaving: Mapping[str, Leave] = MappingProxyType({}),
) -> dict[PoolName, str]:
    """Finds the pools that are smaller than wanted because no GPU is free. Returns pool -> reason.
    The arguments are those of `plan`."""
    waits: dict[PoolName, str] = {}
    for pool in spec.pools:
        current = [m for m in members if m.pool == pool and not m.leaves and m.host not in leaving]
        needs = spec.selectors.get(pool, {}).items()
        fits = [h for h in hosts if h.host_id not in leaving and needs <= h.labels.items()]
        if fits and len(current) < wanted.get(pool, 0):
            waits[pool] = with_free_gpu(spec, pool, members, fits)[1]
    return {pool: why for pool, why in waits.items() if why}
