"""The order in which blocks are transferred to a peer that continues a sequence. Producer and
consumer number the blocks in this order.

Blocks are ordered by their index in the chain, and blocks with the same index by KV group. In a
group with a window, or under a KV budget, only those blocks are transferred that the peer's first
token sees. This table shows the number of each block, for a model with two groups and a peer that
continues after 4 blocks:

    index in the chain    0  1  2  3
    full attention        0  1  2  4
    window of 2 blocks    -  -  3  5      blocks at index 0 and 1 are not transferred

A consumer that already has the block at index 0 receives the blocks from number 1 on.

The running states of a sequence come last (`running_states`). A producer's running states are final
when the prompt is computed, because the consumer decodes. The last frozen states of the prompt are
transferred, too, after the blocks of the index before them. The consumer caches them, because other
requests cannot resume after its running states. A request that resumes after the frozen states sees
earlier blocks of a window than the peer's first token does, so these are transferred, too.
"""

from tandem.engine.cache.block_table import BlockTables
from tandem.engine.cache.layout.kv_groups import KvLayout


def transfer_order(
    layout: KvLayout,
    tables: BlockTables,
    first: int,
    end: int,
    *,
    depth: int,
    checkpoint: int = 0,
) -> list[int]:
    """Returns the ids of the blocks to transfer, among those with the indices `first` to `end` - 1
    in the chain. The ids are unique among the pools.

    The peer continues the sequence after `depth` blocks. With sliding windows or a KV budget,
    blocks that no later token attends to are left out. Running states are left out, too.
    `checkpoint` is the number of blocks after which frozen states are transferred; 0: none are.
    """
    if tables.budget is None and not layout.has_windows:
        return tables.ids[0][first:end]
    layout = tables.budget or layout
    groups = [
        (
            layout.global_ids(number, ids),
            group.num_pieces,
            group.kept_blocks,
            group.first_seen(min(depth, checkpoint or depth) * layout.block_size),
        )
        for number, (ids, group) in enumerate(zip(tables.ids, layout.groups, strict=True))
        if number not in tables.states
    ]
    order = []
    for index in range(first, end):
        for ids, num_pieces, kept, seen in groups:
            if index < kept or index >= seen:
                order += ids[index * num_pieces : (index + 1) * num_pieces]
        if index + 1 == checkpoint:
            order += _slots(layout, tables, 1)
    return order


def running_states(layout: KvLayout, tables: BlockTables) -> list[int]:
    """Returns the ids, unique among the pools, of the pieces of a sequence's running states. Empty
    for a chain without a sequence."""
    return _slots(layout, tables, 0)


def _slots(layout: KvLayout, tables: BlockTables, number: int) -> list[int]:
    """Returns the ids of the pieces of a slot in each state group: of the running states (0), or of
    the frozen states that are transferred (1)."""
    return [
        block_id
        for group in tables.states
        for block_id in layout.global_ids(group, [tables.ids[group][number]])
    ]
