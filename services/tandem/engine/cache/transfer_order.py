"""The order in which blocks are transferred to a peer that continues a sequence. Producer and
consumer number the blocks in this order.

The order is by index in the chain and, for each index, by group. In a group with a window, or under
a KV budget, only the blocks are transferred that the first token after the resume depth sees. The
numbers of the blocks of two groups in an example:

    index in the chain    0  1  2  3
    full attention        0  1  2  4
    window of 2 blocks    -  -  3  5      blocks at index 0 and 1 are not transferred

A consumer that has index 0 already receives the blocks from number 1 on.
"""

from tandem.engine.cache.block_table import BlockTables
from tandem.engine.cache.layout.kv_groups import KvLayout


def transfer_order(
    layout: KvLayout, tables: BlockTables, first: int, end: int, *, depth: int
) -> list[int]:
    """Returns the ids, unique among the pools, of the blocks to transfer whose index in the chain
    is in first..end - 1.

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
