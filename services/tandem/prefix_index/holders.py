"""Names of the holders in the prefix tree: a worker's KV pool, and each tier below it. Pure.

    decode-0         the pool of the worker decode-0
    decode-0#host    its tier in host memory
    decode-0#disk    its tier on disk
    decode-0#store   what it knows of the object store
    #store           the object store, for every worker; no holder of the tree, see `with_store`

A holder has a slot and a log of its own. A tier holds whole prefixes, as a pool does, so its
entries are prefix-closed by themselves. The nested depths of a worker (device; device and host;
device, host and disk) are the largest depth of the holders concerned. A reader without tiers sees
a tier as a worker that it does not know.
"""

from collections.abc import Mapping

STORE = "store"  # the tier that all workers share
MARK = "#"  # in no worker's id


def holder_of(worker_id: str, tier: str) -> str:
    """Returns the name of a worker's tier; an empty `tier` is its pool."""
    return f"{worker_id}{MARK}{tier}" if tier else worker_id


def worker_of(holder: str) -> str:
    """Returns the id of a holder's worker."""
    return holder.partition(MARK)[0]


def source_of(worker_id: str, tier: str) -> str:
    """Returns the name that a look-up has for the blocks that a worker can load from a tier."""
    return MARK + STORE if tier == STORE else holder_of(worker_id, tier)


def with_store(matches: Mapping[str, int]) -> dict[str, int]:
    """Adds the object store to what a look-up found: a block that one worker knows to be there is
    there for all of them."""
    known = [depth for holder, depth in matches.items() if holder.endswith(MARK + STORE)]
    return {**matches, MARK + STORE: max(known)} if known else dict(matches)
