"""Decisions of the pool controller: pure functions from the wanted and the actual pools.

    Member: planned -> starting -> running <-> restarting        (its agent's reports)
               any of them, when the pool shrinks: draining -> gone, and the member is removed

Knows no Ray, no process and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tandem.config.cluster import Pool
from tandem.pool_sizes import POOLS

MemberState = Literal["pending", "running", "restarting", "draining", "gone"]


class PoolCommand(msgspec.Struct, frozen=True):
    """The command of a pool's processes; `{id}`, `{core}` and `{NAME}` of a port are filled in."""

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
    """The processes of this machine; no secrets: those are in the environment."""

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
    last_line: str = ""  # of the log of its process that ended
    since: float = 0.0  # seconds since the Unix epoch: when its agent reported this state

    @property
    def agent_name(self) -> str:
        return f"agent-{self.member_id}-{self.ordinal}"

    @property
    def leaves(self) -> bool:
        return self.state in ("draining", "gone")


def plan(
    spec: ClusterSpec, wanted: Mapping[Pool, int], members: Sequence[Member]
) -> tuple[list[Member], list[Member]]:
    """Returns (members to add, members to drain) so that the pools get their wanted sizes."""
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


def describe(wanted: Mapping[Pool, int], members: Sequence[Member]) -> dict[str, object]:
    """Returns the state of all pools as it lies in Redis and in `/v1/cluster`."""
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
                    "last_line": m.last_line,
                    "since": m.since,
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
    """Returns a core of its own while there are enough; then they are shared evenly."""
    uses = Counter(m.core for m in members if not m.leaves)
    return min(cores, key=lambda core: uses[core], default=None)
