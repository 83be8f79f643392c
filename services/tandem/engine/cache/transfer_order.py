"""The order in which blocks travel to a peer that goes on from them: both sides count in it.

By their index in the chain, and at each index the groups in their order. Of a group with a window,
or under a KV budget, only those travel that are seen by the token after the depth at which a
request can go on:

    full    [ 0  1  3  5 ]      a consumer that has block 0 is sent 1, 2 ... by these numbers,
    window  [       2  4 ]      and blocks before its first missing one never travel
"""

from tandem.engine.cache.block_table import BlockTables
from tandem.engine.cache.layout.kv_groups import KvLayout


def transfer_order(
    layout: KvLayout, tables: BlockTables, first: int, end: int, *, depth: int
) -> list[int]:
    """Returns ids, unique among the pools, of the blocks with an index in first..end - 1.

    A request can go on after `depth` blocks of them.
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
