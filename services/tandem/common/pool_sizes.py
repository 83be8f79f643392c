"""Checks the pool sizes of scale requests, and shows the sizes of pools."""

from collections.abc import Collection, Iterable

from tandem.common.config.cluster import SIZED_POOLS, PoolName, group_of
from tandem.errors import BadRequest

# Largest number of processes in a pool. With Ray, each node offers this many units of the resource
# that stands for the pool.
POOL_SIZE_MAX = 64


def sized_pools(pools: Iterable[PoolName]) -> list[PoolName]:
    """Returns the pools whose sizes operators may set, in a cluster that has `pools`: those of the
    first model, whether the cluster has them or not, and the pools of further models."""
    return [*SIZED_POOLS, *(pool for pool in pools if group_of(pool))]


def check_sizes(sizes: object, pools: Collection[PoolName] = SIZED_POOLS) -> dict[PoolName, int]:
    """Checks the sizes of a scale request for these pools and returns them. Raises BadRequest,
    which names the pool at fault."""
    allowed = f'an object of pool sizes, such as {{"prefill": 2}}; pools are {", ".join(pools)}'
    if not isinstance(sizes, dict) or not sizes:
        raise BadRequest(f"the body must be {allowed}")
    for pool, size in sizes.items():
        if pool not in pools:
            raise BadRequest(f"there is no pool {pool[:80]!r}; send {allowed}", param=pool[:80])
        # At least one router must remain, because scale requests are sent to a router.
        least = 1 if pool == "router" else 0
        if type(size) is not int or not least <= size <= POOL_SIZE_MAX:
            raise BadRequest(
                f"the size of the pool {pool} must be an integer from {least} to {POOL_SIZE_MAX}",
                param=pool,
            )
    return dict(sizes)


def sizes_in_words(sizes: Iterable[tuple[str, int]]) -> str:
    """Shows the sizes of the pools that are not empty, such as "2 decode, 1 encode and 1 prefill".
    Returns "" if all are empty."""
    parts = [f"{size} {pool}" for pool, size in sizes if size]
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
