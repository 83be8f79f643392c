"""Names of the holders in the prefix tree: each worker's KV pool and each of its tiers.

    decode-0         the pool of the worker decode-0
    decode-0#host    its tier in host memory
    decode-0#disk    its tier on disk
    decode-0#store   the blocks of the object store that it knows
    #store           the object store for every worker; not in the tree, see `with_shared_tiers`

Each holder has its own slot and log. A tier holds whole prefixes, as a pool does, so its entries
are prefix-closed. A worker's depth over several holders (device and host; device, host and disk) is
the largest of their depths. A reader without support for tiers sees a tier as an unknown worker.
"""

from collections.abc import Mapping

from tandem.common.kv_tiers import SHARED_TIERS

MARK = "#"  # separator; worker ids do not contain it


def holder_of(worker_id: str, tier: str) -> str:
    """Returns the holder name of a worker's tier; an empty `tier` means its pool."""
    return f"{worker_id}{MARK}{tier}" if tier else worker_id


def worker_of(holder: str) -> str:
    """Returns the worker id in a holder name."""
    return holder.partition(MARK)[0]


def source_of(worker_id: str, tier: str) -> str:
    """Returns the name under which a look-up reports the blocks that a worker can load from a
    tier.
    """
    return MARK + tier if tier in SHARED_TIERS else holder_of(worker_id, tier)


def with_shared_tiers(matches: Mapping[str, int]) -> dict[str, int]:
    """Adds a holder for each tier that all workers share, such as "#store", to a look-up's matches.

    Its depth is the largest of any worker's holder of that tier ("decode-0#store"): a block that
    one worker knows to be in the object store is there for all workers.
    """
    found = dict(matches)
    for tier in SHARED_TIERS:
        depths = [depth for holder, depth in matches.items() if holder.endswith(MARK + tier)]
        if depths:
            found[MARK + tier] = max(depths)
    return found
