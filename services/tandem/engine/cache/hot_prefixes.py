"""The prefixes of a pool that were used last: what a new worker imports first."""

from tandem.engine.cache.block_pool import BlockPool

_LISTED_PER_BLOCK_MAX = 16  # bounds how often long shared prefixes are repeated


def hot_prefixes(pool: BlockPool, blocks_max: int) -> list[list[bytes]]:
    """Returns hashes of the most lately used chains, each from its root on.

    At most `blocks_max` blocks, a prefix that chains share counted once; the last chain may be cut
    short.
    """
    chains: list[list[bytes]] = []
    taken: set[int] = set()  # prefix-closed
    num_listed = 0
    for leaf in pool.leaves():
        room = blocks_max - len(taken)
        if room <= 0 or num_listed > _LISTED_PER_BLOCK_MAX * blocks_max:
            break
        chain = pool.chain(leaf)
        num_shared = sum(block_id in taken for block_id in chain)
        chain = chain[: num_shared + room]
        taken.update(chain)
        num_listed += len(chain)
        chains.append([pool.names_of(block_id)[0] for block_id in chain])
    return chains
