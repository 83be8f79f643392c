"""What the pool controller decides: pure functions from the wanted and the actual pools.

    Member: planned -> starting -> running <-> restarting        (its agent's reports)
               any of them, when the pool shrinks: draining -> gone, and the member is removed

Knows no Ray, no process and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from tandem.config import Pool

POOLS: tuple[Pool, ...] = get_args(Pool)
POOL_SIZE_MAX = 64  # processes of one pool on one machine; also its capacity in Ray's resources

MemberState = Literal["pending", "running", "restarting", "draining", "gone"]


class PoolCommand(msgspec.Struct, frozen=True):
    """How a pool's processes are started; `{id}`, `{core}` and `{NAME}` of a port are filled in."""

    command: list[str]
    ports: dict[str, int] = {}  # of the pool's first process; others get 0, the system's choice
    pinned: bool = False  # its engine gets a core

    def filled(self, member: Member) -> list[str]:
        first = member.member_id == f"{member.pool}-0"
        values = {
            "{id}": member.member_id,
            "{core}": "" if member.core is None else str(member.core),
        }
        values |= {f"{{{name}}}": str(p if first else 0) for name, p in self.ports.items()}
        return [values.get(argument, argument) for argument in self.command]


class ClusterSpec(msgspec.Struct, frozen=True):
    """What runs on this machine; no secrets: those are in the environment."""

    cluster_id: str
    run_folder: str
    pools: dict[Pool, PoolCommand]
    wanted: dict[Pool, int]  # at the start
    cores: list[int]  # that engines may be pinned to
    drain_deadline_s: float = 45.0  # longer than a worker or a router drains itself


class Member(msgspec.Struct, frozen=True):
    """One process of a pool, and the agent that keeps it running."""

    member_id: str  # such as decode-0; the lowest that is free
    pool: Pool
    ordinal: int  # grows with each member made: the newest has the highest
    core: int | None = None
    state: MemberState = "pending"
    pid: int = 0
    num_starts: int = 0

    @property
    def agent_name(self) -> str:
        return f"agent-{self.member_id}-{self.ordinal}"

    @property
    def leaves(self) -> bool:
        return self.state in ("draining", "gone")


def plan(
    spec: ClusterSpec, wanted: Mapping[Pool, int], members: Sequence[Member]
) -> tuple[list[Member], list[Member]]:
    """(members to add, members to drain) so that the pools get their wanted sizes."""
    add: list[Member] = []
    drain: list[Member] = []
    for pool in POOLS:
        there = [m for m in members if m.pool == pool and not m.leaves]
        missing = wanted.get(pool, 0) - len(there)
        for _ in range(missing):
            add.append(_next_member(spec, pool, [*members, *add]))
        if missing < 0:
            drain += sorted(there, key=lambda m: m.ordinal, reverse=True)[:-missing]
    return add, drain


def check_sizes(sizes: object) -> dict[Pool, int]:
    """Sizes as a scale request brings them. Raises ValueError saying what is allowed."""
    if not isinstance(sizes, dict) or not sizes:
        raise ValueError("a scale request is an object of pool sizes, such as {'prefill': 2}")
    for pool, size in sizes.items():
        if pool not in POOLS:
            raise ValueError(f"there is no pool {pool!r}; pools are {', '.join(POOLS)}")
        least = 1 if pool == "router" else 0  # without a router nobody could ask for one
        if type(size) is not int or not least <= size <= POOL_SIZE_MAX:
            allowed = f"{least} to {POOL_SIZE_MAX}"
            raise ValueError(f"the size of {pool} is {size!r}; allowed is {allowed}")
    return dict(sizes)


def describe(wanted: Mapping[Pool, int], members: Sequence[Member]) -> dict[str, object]:
    """The state of all pools as it lies in Redis and in `/v1/cluster`."""
    return {
        pool: {
            "wanted": wanted.get(pool, 0),
            "running": sum(m.pool == pool and m.state == "running" for m in members),
            "agents": [
                {
                    "id": m.member_id,
                    "state": m.state,
                    "pid": m.pid,
                    "core": m.core,
                    "starts": m.num_starts,
                }
                for m in members
                if m.pool == pool
            ],
        }
        for pool in POOLS
    }


def _next_member(spec: ClusterSpec, pool: Pool, members: Sequence[Member]) -> Member:
    taken = {m.member_id for m in members}
    number = next(n for n in range(len(taken) + 1) if f"{pool}-{n}" not in taken)
    ordinal = 1 + max((m.ordinal for m in members), default=-1)
    core = _least_used_core(spec.cores, members) if spec.pools[pool].pinned else None
    return Member(member_id=f"{pool}-{number}", pool=pool, ordinal=ordinal, core=core)


def _least_used_core(cores: Sequence[int], members: Sequence[Member]) -> int | None:
    """A core of its own while there are enough; then they are shared evenly."""
    uses = Counter(m.core for m in members if not m.leaves)
    return min(cores, key=lambda core: uses[core], default=None)
