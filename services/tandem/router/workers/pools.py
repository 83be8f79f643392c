"""Pool sizes between the router and the pool controller, through Redis.

{tandem:CLUSTER}:scale   LIST of JSON {"prefill": 2, "decode": 1}: sizes wanted, newest first
                         (LPUSH here; the controller takes them with RPOP)
{tandem:CLUSTER}:pools   STRING, JSON {pool: {"wanted": n, "running": n, ...}}, written by the
                         controller
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from tandem.config import Pool
from tandem.errors import BadRequest, NoWorkers
from tandem.store.client import UNREACHABLE, Client
from tandem.store.registry import WorkerRecord

POOLS: tuple[str, ...] = get_args(Pool)
POOL_SIZE_MAX = 64
POOL_SIZE_MIN = {"router": 1, "prefill": 0, "decode": 0}  # without a router nobody could ask again
# Nobody takes them while there is no controller.
_PENDING_MAX = 64


def check_sizes(body: dict[str, Any]) -> dict[str, int]:
    """Raises BadRequest naming the pool at fault."""
    allowed = f'an object of pool sizes, such as {{"prefill": 2}}; pools are {", ".join(POOLS)}'
    if not body:
        raise BadRequest(f"the body must be {allowed}")
    for pool, size in body.items():
        if pool not in POOLS:
            raise BadRequest(f"there is no pool {pool[:80]!r}; send {allowed}", param=pool[:80])
        least = POOL_SIZE_MIN[pool]
        if type(size) is not int or not least <= size <= POOL_SIZE_MAX:
            raise BadRequest(
                f"{pool} must be an integer from {least} to {POOL_SIZE_MAX}: the size wanted",
                param=pool,
            )
    return body


async def has_controller(redis: Client, cluster_id: str) -> bool:
    """Whether one has ever told of its pools. Raises NoWorkers when Redis does not answer."""
    try:
        return await read_pools(redis, cluster_id) is not None
    except UNREACHABLE as error:
        raise NoWorkers("pool sizes cannot be set: Redis does not answer") from error


async def ask_sizes(redis: Client, cluster_id: str, sizes: dict[str, int]) -> None:
    """Raises NoWorkers when Redis does not answer."""
    key = f"{{tandem:{cluster_id}}}:scale"
    try:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.lpush(key, msgspec.json.encode(sizes))
            pipe.ltrim(key, 0, _PENDING_MAX - 1)
            await pipe.execute()
    except UNREACHABLE as error:
        raise NoWorkers("pool sizes cannot be set: Redis does not answer") from error


async def read_pools(redis: Client, cluster_id: str) -> bytes | None:
    """As the controller wrote them; None without a controller. Errors of redis-py pass through."""
    value = await redis.get(f"{{tandem:{cluster_id}}}:pools")
    return value.encode() if isinstance(value, str) else value


def pool_states(
    records: Iterable[WorkerRecord], pools_json: bytes | None
) -> dict[str, dict[str, Any]]:
    """The controller's word, and beside it what registered: there may be no controller.

    `ready` workers of a pool may be lent to the other one; `serving` are those that do its work.
    """
    told = told_pools(pools_json)
    registered, ready, serving = Counter[str](), Counter[str](), Counter[str]()
    for record in records:
        is_ready = record.state == "ready"
        registered[record.pool or record.role] += 1
        ready[record.pool or record.role] += is_ready
        serving[record.role] += is_ready
    return {
        name: {
            **told.get(name, {}),
            "registered": registered[name],
            "ready": ready[name],
            "serving": serving[name],
        }
        for name in POOLS
        if name in told or name != "router"
    }


def told_pools(pools_json: bytes | None) -> dict[str, dict[str, Any]]:
    """What the controller wrote; empty without a controller."""
    if pools_json is None:
        return {}
    try:
        return msgspec.json.decode(pools_json, type=dict[str, dict[str, Any]])
    except msgspec.DecodeError:
        return {}
