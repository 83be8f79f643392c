"""Names of the holders in the prefix tree. A holder is the block pool of a worker, or one of the
worker's tiers.

    name             holder
    decode-0         the block pool of the worker decode-0
    decode-0#host    decode-0's tier in host memory
    decode-0#disk    decode-0's tier on disk
    decode-0#store   the blocks that decode-0 knows to be in the object store
    #store           the object store for all workers; not in the tree, see `with_shared_tiers`

Each holder has its own slot and log in the tree. Block pools and tiers hold whole prefixes: a
holder of a block also holds all earlier blocks of the prefix (prefix-closed). A holder's depth for
a prompt is the number of the prompt's leading blocks that the holder has. A worker's depth is the
largest depth of the worker's holders. A program without support for tiers sees a tier as an unknown
worker.
"""

from collections.abc import Mapping

from tandem.common.kv_tiers import SHARED_TIERS

MARK = "#"  # separates the worker id and the tier in a holder name; not allowed in worker ids


def holder_of(worker_id: str, tier: str) -> str:
    """Returns the holder name of a worker's tier, or of the worker's block pool if `tier` is
    empty."""
    return f"{worker_id}{MARK}{tier}" if tier else worker_id


def worker_of(holder: str) -> str:
    """Returns the worker id in a holder name."""
    return holder.partition(MARK)[0]


def source_of(worker_id: str, tier: str) -> str:
    """Returns the name of the holder from which a worker can load the blocks of a tier. For the
    tier "disk" of decode-0, this is "decode-0#disk". For the tier "store", which all workers share,
    it is "#store"."""
    return MARK + tier if tier in SHARED_TIERS else holder_of(worker_id, tier)


def with_shared_tiers(matches: Mapping[str, int]) -> dict[str, int]:
    """Returns the result of a look-up with a holder added for each tier that all workers share.

    For example, {"decode-0#store": 3, "decode-1#store": 5} also gets "#store": 5. If one worker
    knows that a block is in the object store, all workers can load the block from there.
    """
    found = dict(matches)
    for tier in SHARED_TIERS:
        depths = [depth for holder, depth in matches.items() if holder.endswith(MARK + tier)]
        if depths:
            found[MARK + tier] = max(depths)
    return found
