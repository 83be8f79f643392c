"""Names of the holders in the prefix tree. A holder is the block pool of a worker, or one of the
worker's tiers.

    name             holder
    decode-0         the block pool of the worker decode-0
    decode-0#host    decode-0's tier in host memory
    decode-0#disk    decode-0's tier on disk
    decode-0#store   the blocks that decode-0 knows to be in the object store
    #store           the object store for all workers; not in the tree, see `with_shared_tiers`

Each holder has its own slot and log in the tree. A tier holds whole prefixes, as a block pool does.
So a holder of a block also holds all earlier blocks of the prefix (prefix-closed). A holder's depth
is the number of leading blocks of a prompt that it has, and a worker's depth is the largest depth
among its holders. A program without support for tiers sees a tier as an unknown worker.
"""

from collections.abc import Mapping

from tandem.common.kv_tiers import SHARED_TIERS

MARK = "#"  # separates the worker id from the tier; worker ids do not contain it


def holder_of(worker_id: str, tier: str) -> str:
    """Returns the holder name of a worker's tier. An empty `tier` means the worker's block pool."""
    return f"{worker_id}{MARK}{tier}" if tier else worker_id


def worker_of(holder: str) -> str:
    """Returns the worker id in a holder name."""
    return holder.partition(MARK)[0]


def source_of(worker_id: str, tier: str) -> str:
    """Returns the name of the holder from which a worker can load the blocks of a tier:
    "decode-0#disk" for decode-0 and its disk, but "#store" for every worker and the object
    store."""
    return MARK + tier if tier in SHARED_TIERS else holder_of(worker_id, tier)


def with_shared_tiers(matches: Mapping[str, int]) -> dict[str, int]:
    """Adds a holder for each tier that all workers share, such as "#store", to the result of a
    look-up.

    If one worker knows that a block is in the object store, the block is there for all workers. So
    the depth of "#store" is the largest depth among "decode-0#store", "decode-1#store" and so on.
    """
    found = dict(matches)
    for tier in SHARED_TIERS:
        depths = [depth for holder, depth in matches.items() if holder.endswith(MARK + tier)]
        if depths:
            found[MARK + tier] = max(depths)
    return found
