"""The order in which blocks are transferred to a peer that continues from them. Both sides number
the blocks by it.

The order is by index in the chain and, for each index, by group. In a group with a window, or under
a KV budget, only blocks are transferred that are seen by the token after the depth at which the
request resumes:

    full    [ 0  1  3  5 ]      a consumer that has block 0 receives 1, 2 ... by these numbers,
    window  [       2  4 ]      and blocks before its first missing one are never transferred
"""

from tandem.engine.cache.block_table import BlockTables
from tandem.engine.cache.layout.kv_groups import KvLayout


def transfer_order(
    layout: KvLayout, tables: BlockTables, first: int, end: int, *, depth: int
) -> list[int]:
    """Returns the ids, unique among the pools, of the blocks to transfer with an index in
    first..end - 1.

    The request resumes after `depth` blocks.
    """
    if tables.budget is None and not layout.has_windows:
        return tables.ids[0][first:end]
    layout = tables.budget or layout
    groups = [
        (start, ids, group.kept_blocks, group.first_seen(depth * layout.block_size))
        for start, ids, group in zip(layout.first_ids, tables.ids, layout.groups, strict=True)
    ]
    return [
        start + ids[index]
        for index in range(first, end)
        for start, ids, kept, seen in groups
        if index < kept or index >= seen
    ]
