"""Checks the pool sizes of scale requests."""

from tandem.common.config.cluster import SIZED_POOLS, Pool
from tandem.errors import BadRequest

# Largest number of processes in a pool. With Ray, each node offers this many units of the resource
# that stands for the pool.
POOL_SIZE_MAX = 64


def check_sizes(sizes: object) -> dict[Pool, int]:
    """Checks the sizes of a scale request and returns them. Raises BadRequest, which names the pool
    at fault."""
    allowed = (
        f'an object of pool sizes, such as {{"prefill": 2}}; pools are {", ".join(SIZED_POOLS)}'
    )
    if not isinstance(sizes, dict) or not sizes:
        raise BadRequest(f"the body must be {allowed}")
    for pool, size in sizes.items():
        if pool not in SIZED_POOLS:
            raise BadRequest(f"there is no pool {pool[:80]!r}; send {allowed}", param=pool[:80])
        # At least one router must remain, because scale requests are sent to a router.
        least = 1 if pool == "router" else 0
        if type(size) is not int or not least <= size <= POOL_SIZE_MAX:
            raise BadRequest(
                f"the size of the pool {pool} must be an integer from {least} to {POOL_SIZE_MAX}",
                param=pool,
            )
    return dict(sizes)
