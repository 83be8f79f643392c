"""Moves the routers and workers of a host to other hosts before the host ends.

1. The host is marked "leaves" in Redis. The controller then starts replacements on other hosts.
2. When the replacements are ready, the host is marked "drains". Its routers and workers hand over
   their streams and end.
3. When none of them is left, the host ends.

Steps 1 and 2 together take at most `LEAVE_DEADLINE_S` (180 s), of which `DRAIN_S` (60 s) is kept
for step 2. Step 1 does not wait for a process that no other host can take. Example: each host can
have only one router, so if only one other host is left, a second router has no place. The mark is
written repeatedly, because Redis may lose it.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
from rich.markup import escape

from tandem.cluster.processes.owned import forget_leaving, write_leaving
from tandem.common.printable import printable
from tandem.common.process.progress import ProgressRow
from tandem.net.store.client import UNREACHABLE, SyncClient, connect_blocking
from tandem.net.store.registry import WorkerRecord

LEAVE_DEADLINE_S = 180.0
DRAIN_S = 60.0  # limit for step 2; longer than an agent waits for its process to drain
_SETTLED_S = 10.0  # step 1 ends after this many seconds in which no replacement was starting
_INTERVAL_S = 0.5
_ROUTER_STARTS_S = 5.0
_LEAVING = ("draining", "gone", "lost")


class Leaving:
    """Moves the routers and workers of one host to other hosts."""

    def __init__(
        self, *, controller_url: str, worker_url: str, cluster_id: str, host_id: str
    ) -> None:
        """`controller_url` is the URL for the Redis user `controller`, and `worker_url` the URL for
        the Redis user `worker`."""
        self._controller_url = controller_url
        self._worker_url = worker_url
        self._cluster_id = cluster_id
        self._host_id = host_id

    def run(
        self,
        say: Callable[[str], None],
        tick: Callable[[], None],
        show: Callable[[ProgressRow], None] = lambda _: None,
    ) -> None:
        """Moves the processes. Returns when no process is left on this host, the deadline has
        passed or Redis is unreachable. `tick` is called repeatedly, so that this host can renew its
        lease if it is Ray's head. `show` gets the progress."""
        give_up_at = time.monotonic() + LEAVE_DEADLINE_S
        redis = connect_blocking(self._controller_url)
        records = connect_blocking(self._worker_url)
        try:
            write_leaving(redis, self._cluster_id, self._host_id, "leaves")
            until = give_up_at - DRAIN_S
            if lacking := self._wait_for_others(redis, records, until, tick, show):
                say(
                    "[yellow]this host leaves now; on the other hosts, these pools do not have "
                    f"enough processes yet: {', '.join(lacking)}"
                )
            say("draining the routers and workers of this host")
            write_leaving(redis, self._cluster_id, self._host_id, "drains")
            initial = len(self._own(self._pools(redis)))
            while (own := self._own(self._pools(redis))) and time.monotonic() < give_up_at:
                left = ", ".join(agent["id"] for agent in own)
                show(
                    ProgressRow("drain", f"waiting for {left} to end", initial - len(own), initial)
                )
                write_leaving(redis, self._cluster_id, self._host_id, "drains")
                tick()
                time.sleep(_INTERVAL_S)
            forget_leaving(redis, self._cluster_id, self._host_id)
        except UNREACHABLE as error:
            say(
                "[yellow]Redis does not answer, so this host leaves at once: "
                f"{escape(printable(str(error)))}"
            )
        finally:
            redis.close()
            records.close()

    def _wait_for_others(
        self,
        redis: SyncClient,
        records: SyncClient,
        until: float,
        tick: Callable[[], None],
        show: Callable[[ProgressRow], None],
    ) -> list[str]:
        """Waits until each pool has its wanted number of ready processes on other hosts. Gives up
        at the monotonic time `until`, or after `_SETTLED_S` in which no replacement was starting.
        Returns the pools that still lack processes."""
        settles_at = time.monotonic() + _SETTLED_S
        while True:
            pools = self._pools(redis)
            lacking, is_coming = self._check_others(pools, records)
            now = time.monotonic()
            if is_coming:
                settles_at = now + _SETTLED_S
            if not lacking or now > min(until, settles_at):
                return lacking
            show(
                ProgressRow(
                    "hand over",
                    f"waiting for other hosts to start enough processes of: {', '.join(lacking)}",
                )
            )
            write_leaving(redis, self._cluster_id, self._host_id, "leaves")
            tick()
            time.sleep(_INTERVAL_S)

    def _check_others(self, pools: dict[str, Any], records: SyncClient) -> tuple[list[str], bool]:
        """Returns the pools that have too few ready processes on other hosts, and whether a process
        of these pools is still starting there."""
        lacking = []
        is_coming = False
        for pool, state in pools.items():
            if pool == "grpc":
                continue  # gRPC replicas need no check, because each host with a router gets one
            others = [
                agent
                for agent in state["agents"]
                if agent.get("host") != self._host_id and agent["state"] not in _LEAVING
            ]
            num_ready = sum(self._is_ready(pool, agent, records) for agent in others)
            if num_ready < state["wanted"]:
                lacking.append(pool)
                is_coming |= num_ready < len(others)
        return lacking, is_coming

    def _pools(self, redis: SyncClient) -> dict[str, Any]:
        found = redis.get(f"{{tandem:{self._cluster_id}}}:pools")
        return dict(json.loads(found)) if isinstance(found, bytes | str) else {}

    def _own(self, pools: dict[str, Any]) -> list[dict[str, Any]]:
        """Lists the agents of this host that still have a process."""
        agents = [a for state in pools.values() for a in state["agents"]]
        return [a for a in agents if a.get("host") == self._host_id and a["state"] != "lost"]

    def _is_ready(self, pool: str, agent: dict[str, Any], records: SyncClient) -> bool:
        if agent["state"] != "running":
            return False
        if pool == "router":
            return time.time() - float(agent["since"]) > _ROUTER_STARTS_S
        found = records.get(f"{{tandem:{self._cluster_id}}}:worker:{agent['id']}")
        if not isinstance(found, bytes):
            return False
        return msgspec.msgpack.decode(found, type=WorkerRecord).state == "ready"
