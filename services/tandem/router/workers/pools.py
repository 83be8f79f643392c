"""Exchanges pool sizes between the router and the pool controller through Redis.

{tandem:CLUSTER}:scale   LIST of JSON {"prefill": 2, "decode": 1}: requested sizes, newest first
                         (LPUSH here; the controller takes them with RPOP)
{tandem:CLUSTER}:pools   STRING, JSON {pool: {"wanted": n, "running": n, ...}}, written by the
                         controller
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from tandem.common.config.cluster import Pool, group_of, is_pool, role_of
from tandem.errors import NoWorkers
from tandem.net.store.client import UNREACHABLE, UNREADABLE, Client
from tandem.net.store.control_state import CONTROLLER_KEY, HEAD_KEY, control_key
from tandem.net.store.registry import WorkerRecord

# Largest number of requests in the list {tandem:CLUSTER}:scale. The list grows while no controller
# takes the requests.
_PENDING_MAX = 64


async def request_sizes(redis: Client, cluster_id: str, sizes: dict[str, int]) -> bool:
    """Requests `sizes` (pool -> number of workers) from the pool controller. Returns False if there
    is no controller.

    Raises NoWorkers if Redis does not answer.
    """
    key = f"{{tandem:{cluster_id}}}:scale"
    try:
        if await read_pools(redis, cluster_id) is None:
            return False
        async with redis.pipeline(transaction=True) as pipe:
            pipe.lpush(key, msgspec.json.encode(sizes))
            pipe.ltrim(key, 0, _PENDING_MAX - 1)
            await pipe.execute()
        return True
    except UNREACHABLE as error:
        raise NoWorkers("pool sizes cannot be set: Redis does not answer") from error


async def read_pools(redis: Client, cluster_id: str) -> bytes | None:
    """Returns the pools that the pool controller wrote; None if there is no controller.

    Errors of redis-py propagate.
    """
    found = await redis.get(control_key(cluster_id, "pools"))
    return found.encode() if isinstance(found, str) else found


def control_keys(cluster_id: str) -> list[str]:
    """Returns the keys of the pools, the controller's heartbeat and Ray's head.
    `store/control_state.py` describes them."""
    return [control_key(cluster_id, name) for name in ("pools", CONTROLLER_KEY, HEAD_KEY)]


def pool_states(
    records: Iterable[WorkerRecord], pools_json: bytes | None
) -> dict[str, dict[str, Any]]:
    """Returns the state of each pool: what the controller wrote, and counts of its workers.

    `ready` counts the ready workers that belong to the pool, even if they serve in the other pool
    at present. `serving` counts the ready workers that serve in this pool at present. Example: of 3
    ready prefill workers, 1 was moved to decode; the prefill pool has `ready` 3 and `serving` 2.
    Without a controller, the state has only the counts. The encode pool is left out if it has no
    worker and no controller.
    """
    written = decode_pools(pools_json)
    registered = Counter[str]()
    ready = Counter[str]()
    serving = Counter[str]()
    for record in records:
        is_ready = record.state == "ready"
        registered[record.pool or record.role] += 1
        ready[record.pool or record.role] += is_ready
        serving[record.role] += is_ready
    return {
        name: {
            **written.get(name, {}),
            "registered": registered[name],
            "ready": ready[name],
            "serving": serving[name],
        }
        for name in get_args(Pool)
        if name in written or name in ("prefill", "decode") or registered[name]
    }


def pools_of_group(pools_json: bytes | None, group: str) -> bytes | None:
    """Returns the pools of one model's group, out of those that the controller wrote. Their names
    in the result are those of `Pool`."""
    pools = decode_pools(pools_json)
    if pools_json is None or (not group and not any(map(group_of, pools))):
        return pools_json
    own = {
        role_of(name): state
        for name, state in pools.items()
        if group_of(name) == group and is_pool(name)
    }
    return msgspec.json.encode(own)


def decode_pools(pools_json: bytes | None) -> dict[str, dict[str, Any]]:
    """Returns the pools that the controller wrote; empty without a controller."""
    if pools_json is None:
        return {}
    try:
        return msgspec.json.decode(pools_json, type=dict[str, dict[str, Any]])
    except UNREADABLE:
        return {}
