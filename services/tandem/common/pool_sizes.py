"""The pools and the sizes that may be requested for them."""

from tandem.common.config.cluster import SIZED_POOLS, Pool
from tandem.errors import BadRequest

POOL_SIZE_MAX = 64  # processes of one pool on one machine; also its capacity in Ray's resources


def check_sizes(sizes: object) -> dict[Pool, int]:
    """Returns the sizes of a scale request. Raises BadRequest that names the wrong pool."""
    allowed = (
        f'an object of pool sizes, such as {{"prefill": 2}}; pools are {", ".join(SIZED_POOLS)}'
    )
    if not isinstance(sizes, dict) or not sizes:
        raise BadRequest(f"the body must be {allowed}")
    for pool, size in sizes.items():
        if pool not in SIZED_POOLS:
            raise BadRequest(f"there is no pool {pool[:80]!r}; send {allowed}", param=pool[:80])
        least = 1 if pool == "router" else 0  # without a router, no further request could be made
        if type(size) is not int or not least <= size <= POOL_SIZE_MAX:
            raise BadRequest(
                f"{pool} must be an integer from {least} to {POOL_SIZE_MAX}: the size wanted",
                param=pool,
            )
    return dict(sizes)
