"""The KV pools of all KV groups together: allocates the blocks of each sequence, and finds the
cached blocks that a request can reuse.

A request can reuse the first d blocks of its prompt (a hit at depth d) under two conditions:

- The group with full attention has all d blocks.
- Each group with a window has those of the d blocks that the next token sees. A state group has the
  frozen state after block d - 1.

`match` finds the largest such d. For example, with d = 5, blocks of 16 tokens and a window of 33
tokens, the group with the window needs only blocks 3 and 4.

A block table without a window starts at block 0. With a window it starts at the first block that
the next token sees: `free_out_of_window` releases the blocks before that one, and `extend`
allocates blocks for the next tokens. The ids in tables belong to the group's pool. Callers outside
the engine use ids that are unique among the pools (layout/kv_groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.common.adapter import Adapter
from tandem.common.kv_budget import KvBudget
from tandem.common.perf_model.rates import WindowBytes, WorkerRates
from tandem.common.worker_load import GroupLoad
from tandem.engine.cache.block_copy import BlockCopy, BlockPart
from tandem.engine.cache.block_table import NULL_BLOCK, BlockTables, UnfilledBlocks
from tandem.engine.cache.heavy_hitters import HeavyHitters
from tandem.engine.cache.layout.kv_groups import KvGroup, KvLayout
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.cache.pool.window_pool import FrozenStatePool, WindowPool
from tandem.engine.cache.resumable_depths import ResumableChains, ResumableDepths
from tandem.engine.types import BlockChanges, StoredBlock

# `hot_prefixes` stops after it has listed this many hashes for each of its `blocks_max` blocks.
# Chains with a common prefix all list the hashes of this prefix, so without a limit the lists could
# have many more hashes than there are blocks.
_LISTED_PER_BLOCK_MAX = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDemand:
    """The block tables that a sequence or a chain needs: the first `depth` blocks of the chain
    `block_hashes`, which must be cached, and newly allocated blocks after them.

    - `num_tokens`, `resume`: the sequence has `num_tokens` tokens and resumes after the first
      `resume` of them. In a group with a window, the table starts at the first block that the next
      token sees, and has at most the blocks that a decode step needs.
    - `budget`: with a KV budget, no cached block is referenced.
    - `loaded`: number of leading blocks that a load from tiers will provide; 0: no load. If some of
      these blocks are cached already, the tables reference them.
    - `sources`: one block for each group, which the engine will copy into the group's first
      allocated block. The sources stay referenced until `end_copies`. A group needs no copy, and
      ignores its source, if its table starts after the block at index `depth`.
    - `taken`: one cached frozen state for each state group. It becomes the running state, without a
      copy. Empty: none does.
    - `checkpoint`: frozen states after this number of blocks will be transferred, so each state
      group gets a slot for them. If the sequence resumes there, it is the cached slot. 0: none.
    - `is_chain`: the tables are those of a chain without a sequence, so no running state is
      allocated in state groups. Instead, the tables have the frozen state at the chain's end.
    """

    num_tokens: int
    resume: int
    block_hashes: Sequence[bytes] = ()
    depth: int = 0
    sources: Sequence[int | None] = ()
    taken: Sequence[int] = ()
    checkpoint: int = 0
    budget: KvBudget | None = None
    loaded: int = 0
    is_chain: bool = False


class _Wanted(NamedTuple):
    """What a sequence takes from one pool."""

    span: tuple[int, int, int]  # as in `_spans`
    hashes: Sequence[bytes]  # of the cached blocks
    num_blocks: int  # with the cached ones
    source: int | None  # the block that is copied into the first allocated block
    taken: int | None  # the cached frozen state that becomes the running state
    may_have_gaps: bool  # True: some blocks of `hashes` may be missing, and a load fills them


def _pool_class(group: KvGroup) -> type[BlockPool]:
    if group.has_states:
        return FrozenStatePool
    return BlockPool if group.window is None else WindowPool


class KvCache:
    def __init__(
        self, layout: KvLayout, *, report_tokens: bool = False, num_scratch: int = 0
    ) -> None:
        """With `report_tokens`, the events of stored blocks include their token ids. `num_scratch`
        slots of each state group are scratch slots."""
        self.layout = layout
        self._block_size = layout.block_size
        self.pools: list[BlockPool] = [
            _pool_class(group)(group.layout.num_blocks, report_tokens=report_tokens)
            for group in layout.groups
        ]
        self._depths = ResumableDepths(layout) if layout.has_windows else None
        has_chains = report_tokens and layout.has_windows and layout.groups[0].window is None
        self._chains = ResumableChains() if has_chains else None
        # The changes that the next `take_chain_changes` returns: those of the last `take_events`.
        # None: there were no changes, or they were returned already.
        self._chain_changes: BlockChanges | None = None
        self.has_windows = layout.has_windows
        self._state_groups = layout.state_groups
        self.has_states = bool(self._state_groups)
        self.has_working_states = layout.has_working_states
        self._num_scratch = num_scratch
        for number in self._state_groups:
            self._state_pool(number).reserve_scratch(num_scratch)
        # Number of slots for the states of sequences, if the model has states.
        self.num_slots = min(
            (layout.sizes[number] - num_scratch for number in self._state_groups), default=0
        )
        # (group, slot) of each quarantined slot -> the ids of the pieces that a pull may still
        # write. The slot is free when the pull can write none of them.
        self._unsafe_pieces: dict[tuple[int, int], set[int]] = {}

    def rates(self, step_tokens: int) -> WorkerRates:
        """Returns the rates that a worker with these pools reports until it has measured its
        own."""
        windows = tuple(
            # Of states, the running ones and the last frozen ones of a prompt are transferred.
            WindowBytes(2 if group.has_states else group.decode_blocks, group.layout.block_bytes)
            for group in self.layout.groups
            if group.decode_blocks is not None
        )
        return WorkerRates(
            step_tokens=step_tokens, block_bytes=self.layout.block_bytes, windows=windows
        )

    def match(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks a request with these block hashes can reuse. References
        no block."""
        depth = len(block_hashes)
        for group, pool in zip(self.layout.groups, self.pools, strict=True):
            if group.window is None:
                depth = len(pool.match(block_hashes[:depth]))
        return self.layout.deepest_hit(block_hashes, depth, self._has)

    def _has(self, group: int, block_hash: bytes) -> bool:
        return self.pools[group].find(block_hash) is not None

    def find_partial_block(self, parent_hash: bytes, token_ids: Sequence[int]) -> BlockPart | None:
        """Returns the cached block that has the longest common start with `token_ids`, and the
        number of common tokens.

        Considers only blocks that follow the block `parent_hash`. Returns None if none of them
        starts with `token_ids[0]`. References no block.

        With state groups, returns the frozen states after the block `parent_hash`, because no
        sequence can continue inside a block. None: there are none.
        """
        if self.has_states:
            states = self.find_states(parent_hash)
            is_cached = all(states[number] is not None for number in self._state_groups)
            return BlockPart(0, states) if is_cached else None
        for num_tokens, block_hash in self.pools[0].children.closest(parent_hash, token_ids):
            found = [pool.find(block_hash) for pool in self.pools]
            if None not in found:
                return BlockPart(num_tokens, tuple(found))
        return None

    def reserve(self, demand: BlockDemand) -> BlockTables | None:
        """Returns the block tables that `demand` describes. Returns None, and changes nothing, if
        there is not enough room."""
        wanted = self._wanted(demand)
        if not self._fit(wanted):
            return None
        states = () if demand.is_chain else self._state_groups
        tables = BlockTables(states=states, checkpoint=demand.checkpoint)
        budget = demand.budget
        if budget is not None and budget.keeps_hitters:
            tables.hitters = HeavyHitters(budget, self._block_size)
        elif budget is not None:
            tables.budget = self._layout_under(budget)
        for number, (pool, each) in enumerate(zip(self.pools, wanted, strict=True)):
            kept, first, _ = each.span
            if each.taken is not None:
                blocks = self._state_pool(number).take(each.taken)
            elif each.may_have_gaps:
                assert isinstance(pool, WindowPool)
                any_blocks = pool.reserve_any(each.hashes, each.num_blocks)
                assert any_blocks is not None
                blocks = any_blocks
            else:
                found = pool.reserve(each.hashes, each.num_blocks, each.source)
                assert found is not None
                num_cached = found.num_cached_blocks
                assert demand.loaded or num_cached == len(each.hashes), "there was no such hit"
                blocks = found.block_table
            if number in tables.states:
                blocks.reverse()  # the running state comes first
            tables.ids.append(blocks[:kept] + [NULL_BLOCK] * (first - kept) + blocks[kept:])
            tables.firsts.append(first)
            tables.kept.append(kept)
        return tables

    def can_reserve(self, demand: BlockDemand) -> bool:
        """Returns whether `reserve` would find enough room."""
        return self._fit(self._wanted(demand))

    def _wanted(self, demand: BlockDemand) -> list[_Wanted]:
        """Returns what `reserve` takes from each pool."""
        block_hashes, depth, checkpoint = demand.block_hashes, demand.depth, demand.checkpoint
        spans = _spans(
            self._layout_under(demand.budget),
            _most_kept(demand.budget, demand.num_tokens),
            demand.resume,
            is_chain=demand.is_chain,
            checkpoint=checkpoint,
        )
        states = () if demand.is_chain else self._state_groups
        frozen = dict(zip(states, demand.taken, strict=False))
        wanted = []
        for number, (pool, span, source) in enumerate(
            zip(self.pools, spans, self._copied(demand.sources, spans, depth), strict=True)
        ):
            kept, first, end = span
            hashes = block_hashes[first : max(depth, demand.loaded)]
            num_blocks = kept + end - first
            if number in states:
                hashes = _transferred(block_hashes, depth, checkpoint)
                num_blocks += checkpoint > 0
            may_have_gaps = (
                demand.loaded > 0 and isinstance(pool, WindowPool) and number not in states
            )
            wanted.append(
                _Wanted(span, hashes, num_blocks, source, frozen.get(number), may_have_gaps)
            )
        return wanted

    def _fit(self, wanted: Sequence[_Wanted]) -> bool:
        """Returns whether the pools have room for what `reserve` takes from them."""
        for number, (pool, each) in enumerate(zip(self.pools, wanted, strict=True)):
            if each.taken is not None:
                fits = each.num_blocks == 1 and self._state_pool(number).may_take(each.taken)
            elif each.may_have_gaps:
                assert isinstance(pool, WindowPool)
                fits = pool.can_reserve_any(each.hashes, each.num_blocks)
            else:
                fits = pool.can_reserve(each.hashes, each.num_blocks, each.source)
            if not fits:
                return False
        return True

    def unfilled(
        self, tables: BlockTables, end: int, copied: Collection[int] = ()
    ) -> list[UnfilledBlocks]:
        """Returns the blocks before index `end` of the tables that have no KV yet. Groups without
        such blocks are left out.

        For a state group this is the running state, which a load fills with the frozen state after
        `end` blocks. Groups in `copied` need none, because theirs is a copy of a cached state.
        """
        found = []
        for number, (pool, ids, first) in enumerate(
            zip(self.pools, tables.ids, tables.firsts, strict=True)
        ):
            if number in tables.states:
                if number not in copied:
                    found.append(UnfilledBlocks(number, [end - 1], ids[:1]))
            elif indices := pool.find_writable(ids, first, end):
                found.append(UnfilledBlocks(number, indices, [ids[i] for i in indices]))
        return found

    def find_states(self, block_hash: bytes) -> tuple[int | None, ...]:
        """Returns the cached frozen states after a block, one for each KV group. None: the group
        has no states, or none is cached. References no slot."""
        return tuple(
            pool.find(block_hash) if group.has_states else None
            for group, pool in zip(self.layout.groups, self.pools, strict=True)
        )

    def want_copies(self, block_hashes: Sequence[bytes]) -> None:
        """Lets tiers copy what a request needs to resume at the end of this chain of block hashes,
        or before its end: the window groups' blocks that are seen after all blocks or after all but
        the last one, and the last frozen state with the blocks that are seen after it."""
        resume = (len(block_hashes) - 1) * self.layout.block_size
        for group, pool in zip(self.layout.groups, self.pools, strict=True):
            if isinstance(pool, FrozenStatePool):
                self._want_states(block_hashes[: pool.last_depth(block_hashes)])
            elif block_hashes and isinstance(pool, WindowPool):
                pool.want_copies(block_hashes[group.first_seen(resume) :])

    def end_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Drops the references to the source blocks of these copies."""
        for copy in copies:
            self.pools[copy.group].release([copy.source])

    def _copied(
        self, sources: Sequence[int | None], spans: Sequence[tuple[int, int, int]], depth: int
    ) -> list[int | None]:
        """Returns the block to copy in each group. The copy becomes the block at index `depth`.
        None: the group's table starts after this index, so no copy is needed."""
        if not sources:
            return [None] * len(spans)
        pairs = zip(sources, spans, strict=True)
        return [source if first <= depth else None for source, (_, first, _) in pairs]

    def _layout_under(self, budget: KvBudget | None) -> KvLayout:
        has_window = budget is not None and not budget.keeps_hitters
        return self.layout.under(budget) if budget is not None and has_window else self.layout

    def is_windowed(self, tables: BlockTables) -> bool:
        """Returns whether `free_out_of_window` can release blocks of the tables."""
        return self.has_windows or tables.budget is not None

    def room_for_import(self, block_hashes: Sequence[bytes], depth: int) -> int:
        """Returns how many leading blocks of a chain can be reserved without an eviction, if the
        first `depth` blocks are cached.

        With sliding windows, the result is the length of the chain if there is room for all of it,
        and `depth` otherwise.
        """
        num_blocks = len(block_hashes)
        num_tokens = num_blocks * self.layout.block_size
        spans = _spans(self.layout, num_tokens, num_tokens, is_chain=True)
        room = min(
            max(first, depth) + pool.num_free
            for pool, (_, first, _) in zip(self.pools, spans, strict=True)
        )
        return min(room, num_blocks) if room >= num_blocks or not self.has_windows else depth

    def room_for_load(
        self, block_hashes: Sequence[bytes], depth: int, end: int, spare: Sequence[int]
    ) -> int:
        """Returns how many leading blocks of a chain can be reserved, at most `end`, if the first
        `depth` blocks are cached. CACHED blocks are evicted for it, but each pool can then still
        give `spare` blocks.

        With sliding windows, the result is `end` if there is room for all of it, and `depth`
        otherwise.
        """
        if end <= depth:
            return depth
        num_tokens = end * self.layout.block_size
        spans = _spans(self.layout, num_tokens, num_tokens, is_chain=True)
        room = end
        for pool, (_, first, last), left in zip(self.pools, spans, spare, strict=True):
            num_lacking = pool.num_lacking(block_hashes[first:last], last - first) + left
            room = min(room, end - num_lacking)
        return room if room == end or not self.has_windows else depth

    def extend(self, tables: BlockTables, num_tokens: int) -> int:
        """Allocates blocks so that the tables cover `num_tokens` tokens. Returns the number of
        tokens that they cover, which is smaller if a pool has too few blocks."""
        size = self._block_size
        passed = tables.num_evicted_tokens
        num_blocks = covered = -(-(num_tokens - passed) // size)
        for number, (pool, ids) in enumerate(zip(self.pools, tables.ids, strict=True)):
            if number in tables.states:
                continue
            while len(ids) < num_blocks:
                taken = pool.allocate(1)
                if taken is None:
                    break
                ids += taken
            covered = min(covered, len(ids))
        return min(num_tokens, covered * size + passed)

    def extend_free(self, tables: BlockTables, num_tokens: int) -> int:
        """Extends the tables as `extend` does, but takes only FREE blocks, so that no cached block
        is evicted."""
        for number, (pool, ids) in enumerate(zip(self.pools, tables.ids, strict=True)):
            if number not in tables.states:
                room = (len(ids) + pool.num_free) * self._block_size
                num_tokens = min(num_tokens, room + tables.num_evicted_tokens)
        return self.extend(tables, num_tokens)

    def trim(self, tables: BlockTables, num_tokens: int) -> None:
        """Releases the blocks at the end of the tables that `num_tokens` tokens do not need. No
        such block may have a hash, or KV that still counts."""
        num_blocks = -(-num_tokens // self._block_size)
        for number, (pool, ids) in enumerate(zip(self.pools, tables.ids, strict=False)):
            if number not in tables.states and len(ids) > num_blocks:
                pool.release(ids[num_blocks:])
                del ids[num_blocks:]

    def free_out_of_window(
        self, tables: BlockTables, num_tokens: int, *, num_reserved: int = 0
    ) -> None:
        """Releases the blocks that left the window: those that no token after the first
        `num_tokens` tokens sees.

        `num_reserved` is the number of tokens of a prompt that is computed for a peer which also
        gets frozen states, else 0. Such a sequence takes a new block for each one that it releases,
        until it has blocks for all its tokens. So it never waits for a block: several such
        sequences, which are not preempted, could wait for each other.
        """
        for number, group in enumerate((tables.budget or self.layout).groups):
            if group.window is None or number in tables.states:
                continue
            ids = tables.ids[number]
            first = tables.firsts[number]
            end = min(group.first_seen(num_tokens), len(ids))
            if end > first:
                pool = self.pools[number]
                kept = tables.kept[number] = min(group.kept_blocks, end)
                passed = ids[max(first, kept) : end]
                if isinstance(pool, WindowPool):
                    pool.release_out_of_window(passed)
                else:
                    # Under a KV budget, blocks have no hashes, so they become FREE.
                    pool.release(passed)
                ids[max(first, kept) : end] = [NULL_BLOCK] * len(passed)
                tables.firsts[number] = end
            if num_reserved:
                num_blocks = self.layout.blocks_of(num_reserved)
                held = _most_held(group, num_blocks, tables.checkpoint)
                num_blocks = min(num_blocks, tables.firsts[number] + held)
                while len(ids) < num_blocks and (fresh := self.pools[number].allocate(1)):
                    ids += fresh

    def store(
        self,
        tables: BlockTables,
        block_hashes: Sequence[bytes],
        *,
        chain_root: bytes,
        first: int,
        last: int,
        block_tokens: Callable[[int], Sequence[int]] | None = None,
        adapter: Adapter | None = None,
        resumable: Collection[int] = (),
    ) -> None:
        """Caches the blocks with indices `first` to `last` - 1 of the tables under their hashes.
        The blocks before them are cached already.

        If the pool already has an equal block, the table gets that block instead of its own.
        `block_tokens(i)` returns the token ids of block i, if known. `adapter` is only used in
        events. `resumable` lists the depths at which later requests are expected to resume. Tiers
        may copy the blocks that windows need at these depths. Running states are not cached.
        """
        for number, (group, pool, ids, held) in enumerate(
            zip(self.layout.groups, self.pools, tables.ids, tables.firsts, strict=True)
        ):
            if number in tables.states:
                continue
            for i in range(max(first, held), last):
                if pool.find(block_hashes[i]) == ids[i]:
                    # The block was cached before the load, which filled only missing blocks.
                    continue
                ids[i] = pool.store(
                    ids[i],
                    parent_id=ids[i - 1] if i and group.window is None else None,
                    parent_hash=block_hashes[i - 1] if i else chain_root,
                    block_hash=block_hashes[i],
                    token_ids=block_tokens(i) if block_tokens else (),
                    index=i,
                    adapter=adapter,
                )
        for depth in resumable:
            if first < depth <= last:
                self.want_copies(block_hashes[:depth])

    def freeze(
        self,
        tables: BlockTables,
        block_hashes: Sequence[bytes],
        *,
        chain_root: bytes,
        token_ids: Sequence[int] = (),
        adapter: Adapter | None = None,
        is_wanted: bool = False,
    ) -> list[BlockCopy]:
        """Caches copies of a sequence's running states under the last of `block_hashes`, after
        which they are. `token_ids` are the tokens of this block. With `is_wanted`, tiers may copy
        these states at once; otherwise not before `want_copies`.

        Returns the copies, which the caller must make at once. Makes none if the states are cached
        already, or if all slots are in use or have pinned states. States that are transferred have
        a slot of the sequence, which it keeps.
        """
        copies = []
        is_transferred = len(block_hashes) == tables.checkpoint
        for group in tables.states:
            pool = self._state_pool(group)
            running = tables.ids[group][0]
            if is_transferred:
                slot = tables.ids[group][1]
                if not pool.is_writable(slot):
                    continue  # the sequence has resumed after these states
            elif (
                pool.find(block_hashes[-1]) is not None
                or (free := pool.allocate_for_copy()) is None
            ):
                continue
            else:
                slot = free
            stored = _store_state(pool, slot, block_hashes, chain_root, token_ids, adapter)
            if is_transferred:
                tables.ids[group][1] = stored
            else:
                pool.release([stored])
            if stored == slot:
                copies.append(BlockCopy(running, slot, group))
        if is_wanted:
            self._want_states(block_hashes)
        return copies

    def store_checkpoint(
        self,
        tables: BlockTables,
        block_hashes: Sequence[bytes],
        *,
        chain_root: bytes,
        token_ids: Sequence[int] = (),
        adapter: Adapter | None = None,
    ) -> None:
        """Caches the frozen states that a peer has sent, as `freeze` does, and drops the references
        to their slots."""
        for group in tables.states:
            pool = self._state_pool(group)
            slot = tables.ids[group].pop()
            pool.release([_store_state(pool, slot, block_hashes, chain_root, token_ids, adapter)])
        self._want_states(block_hashes)
        tables.checkpoint = 0

    @property
    def num_scratch(self) -> int:
        """Number of sequences that can have scratch slots now. Only if the model has states."""
        return min(self._state_pool(number).num_scratch for number in self._state_groups)

    def take_scratch(self, tables: BlockTables) -> list[BlockCopy]:
        """Takes a scratch slot of each state group for one step of a sequence. Returns the copies
        of its running states to these slots, which the caller must make before the step."""
        return [
            BlockCopy(tables.ids[group][0], self._state_pool(group).take_scratch(), group)
            for group in tables.states
        ]

    def return_scratch(self, copies: Iterable[BlockCopy]) -> None:
        """Ends the use of scratch slots, whose states are dropped."""
        for copy in copies:
            self._state_pool(copy.group).return_scratch(copy.target)

    def keep_scratch(self, tables: BlockTables, copies: Iterable[BlockCopy]) -> None:
        """Makes the scratch slots of a sequence its running states."""
        for copy in copies:
            self._state_pool(copy.group).exchange_scratch(copy.target, copy.source)
            tables.ids[copy.group][0] = copy.target

    def evict_first(self, tables: BlockTables, block_hash: bytes) -> None:
        """Makes a sequence's frozen states the first to be evicted, if they are cached and no
        sequence uses them."""
        for group in tables.states:
            self._state_pool(group).evict_first(block_hash)

    def _want_states(self, block_hashes: Sequence[bytes]) -> None:
        """Lets tiers copy the frozen states at the end of this chain, and the window groups' blocks
        that are seen there."""
        end = len(block_hashes) * self.layout.block_size
        for group, pool in zip(self.layout.groups, self.pools, strict=True):
            if isinstance(pool, WindowPool):
                pool.want_copies(block_hashes[group.first_seen(end) :])

    def _state_pool(self, group: int) -> FrozenStatePool:
        pool = self.pools[group]
        assert isinstance(pool, FrozenStatePool)
        return pool

    def release(self, tables: BlockTables, unsafe: Collection[int] = ()) -> None:
        """Drops the tables' references to their blocks. The blocks in `unsafe`, which a pull or a
        tier load may still write, stay in quarantine until `unquarantine`."""
        self._note_unsafe(unsafe)
        for number, quarantined in enumerate(self._by_group(unsafe)):
            if tables:
                pool = self.pools[number]
                pool.quarantine(quarantined)
                pool.release([b for b in tables.held(number) if b not in quarantined])

    def replace(self, tables: BlockTables, unsafe: Collection[int]) -> bool:
        """Quarantines the blocks in `unsafe`, which a pull may still write, and puts newly
        allocated blocks into the tables instead. Returns False, and changes nothing, if too few
        blocks are available."""
        by_group = self._by_group(unsafe)
        if any(
            len(blocks) > pool.num_available
            for pool, blocks in zip(self.pools, by_group, strict=True)
        ):
            return False
        self._note_unsafe(unsafe)
        for pool, blocks, ids in zip(self.pools, by_group, tables.ids, strict=True):
            fresh = pool.allocate(len(blocks))
            assert fresh is not None
            others = dict(zip(blocks, fresh, strict=True))
            pool.quarantine(blocks)
            ids[:] = [others.get(b, b) for b in ids]
        return True

    def defer_frees(self) -> None:
        """Keeps released blocks from pulls and loads until `free_deferred`, because a step in
        flight may still use them."""
        for pool in self.pools:
            pool.defer_frees()

    def free_deferred(self) -> None:
        """Frees the blocks that were released since `defer_frees`."""
        for pool in self.pools:
            pool.free_deferred()

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """Frees these blocks if they are quarantined. No pull can write them any more."""
        safe = dict.fromkeys(block_ids)
        for slot, pieces in list(self._unsafe_pieces.items()):
            pieces.difference_update(safe)
            if not pieces:
                del self._unsafe_pieces[slot]
        by_group: list[list[int]] = [[] for _ in self.pools]
        for group, local in dict.fromkeys(map(self.layout.locate, safe)):
            if (group, local) not in self._unsafe_pieces:
                by_group[group].append(local)
        for pool, blocks in zip(self.pools, by_group, strict=True):
            pool.unquarantine(blocks)

    def _note_unsafe(self, block_ids: Iterable[int]) -> None:
        """Records which pieces of quarantined slots a pull may still write."""
        for block_id in block_ids if self.has_states else ():
            slot = self.layout.locate(block_id)
            if slot[0] in self._state_groups:
                self._unsafe_pieces.setdefault(slot, set()).add(block_id)

    def global_ids(self, tables: BlockTables, first: int = 0) -> list[int]:
        """Returns the blocks of the tables from index `first` on, group after group, as ids that
        are unique among the pools."""
        return [
            block_id
            for number in range(len(self.pools))
            if tables
            for block_id in self.layout.global_ids(number, tables.held(number, first))
        ]

    def _by_group(self, block_ids: Iterable[int]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.pools]
        for group, local in dict.fromkeys(map(self.layout.locate, block_ids)):
            found[group].append(local)
        return found

    def drop_cached(self) -> int:
        """Frees all CACHED blocks, so that `match` finds only blocks that sequences use. Returns
        their number."""
        return sum(pool.drop_cached() for pool in self.pools)

    @property
    def num_quarantined(self) -> int:
        return sum(pool.num_quarantined for pool in self.pools)

    @property
    def num_usable_blocks(self) -> list[int]:
        """For each KV group, the number of blocks that sequences can have: all but the scratch
        slots."""
        return [
            pool.num_blocks - group.has_states * self._num_scratch
            for group, pool in zip(self.layout.groups, self.pools, strict=True)
        ]

    def group_loads(self) -> tuple[GroupLoad, ...]:
        """Returns how many blocks of each pool are used. Empty for a model without sliding windows,
        which has a single pool."""
        if not self.has_windows:
            return ()
        return tuple(
            GroupLoad(num_usable, pool.num_used, self.layout.held_blocks(group) or 0)
            for num_usable, group, pool in zip(
                self.num_usable_blocks, self.layout.groups, self.pools, strict=True
            )
        )

    @property
    def has_events(self) -> bool:
        return any(pool.has_events for pool in self.pools)

    def take_events(self) -> tuple[list[StoredBlock], list[bytes]]:
        """Returns the net changes since the last call: (stored blocks, hashes of removed blocks).

        Stored blocks are listed parents first, removed ones children first. With sliding windows, a
        block counts as stored when a request can resume after it, and as removed when none can.
        """
        events = [pool.take_events() for pool in self.pools]
        if self._depths is None:
            return events[0]
        resumable = self._depths.update(events)
        if self._chains is not None:
            self._chain_changes = self._chains.update(events[0], resumable)
        return resumable

    def take_chain_changes(self) -> BlockChanges | None:
        """Returns the changes of `ResumableChains` in the last `take_events`. This set has the
        resumable blocks and all blocks before them in their chains.

        Returns None without sliding windows, without `report_tokens`, or if no group has full
        attention.
        """
        changes, self._chain_changes = self._chain_changes, None
        return changes

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Returns the hashes h with `first` <= h < `end` of the blocks that events report as
        present; an empty `end` means no upper bound."""
        if self._depths is None:
            return self.pools[0].block_hashes(first, end)
        return self._depths.block_hashes(first, end)

    def hot_prefixes(self, blocks_max: int) -> list[list[bytes]]:
        """Returns the most recently used chains as lists of block hashes, each from its first block
        to the largest depth at which a request can resume."""
        if self.layout.groups[0].window is not None:
            return []  # a pool with a window does not record chains
        chains = _hot_prefixes(self.pools[0], blocks_max)
        return [cut for chain in chains if (cut := chain[: self.match(chain)])]

    def check_integrity(self, tables: Iterable[BlockTables]) -> None:
        """Raises AssertionError if a pool is inconsistent. `tables` must include every table that
        references blocks."""
        held = [each for each in tables if each]
        for number, pool in enumerate(self.pools):
            for each in held:
                passed = each.ids[number][each.kept[number] : each.firsts[number]]
                assert set(passed) <= {NULL_BLOCK}, "a passed block is named"
            pool.check_integrity(each.held(number) for each in held)


def _transferred(block_hashes: Sequence[bytes], depth: int, checkpoint: int) -> Sequence[bytes]:
    """Returns the hash under which the frozen states after `checkpoint` blocks are cached, if a
    sequence resumes there, after `depth` blocks. A sequence that resumes before them computes or
    pulls them."""
    return block_hashes[checkpoint - 1 : checkpoint] if depth >= checkpoint > 0 else ()


def _store_state(
    pool: WindowPool,
    slot: int,
    block_hashes: Sequence[bytes],
    chain_root: bytes,
    token_ids: Sequence[int],
    adapter: Adapter | None,
) -> int:
    """Caches a slot under the last of `block_hashes`, whose tokens are `token_ids`. Returns the
    slot that has the state from now on, as `BlockPool.store` does."""
    return pool.store(
        slot,
        parent_id=None,
        parent_hash=block_hashes[-2] if len(block_hashes) > 1 else chain_root,
        block_hash=block_hashes[-1],
        token_ids=token_ids,
        index=len(block_hashes) - 1,
        adapter=adapter,
    )


def _most_kept(budget: KvBudget | None, num_tokens: int) -> int:
    """Returns the largest number of tokens that have KV in the pool at one time, for a sequence of
    `num_tokens` tokens."""
    return min(num_tokens, budget.tokens) if budget and budget.keeps_hitters else num_tokens


def _spans(
    layout: KvLayout, num_tokens: int, resume: int, *, is_chain: bool, checkpoint: int = 0
) -> list[tuple[int, int, int]]:
    """Returns (kept, first, end) for each group. The group's table has blocks for the indices 0 to
    `kept` - 1 and `first` to `end` - 1. The first `kept` blocks are sinks, which every token sees
    under a KV budget; without a budget `kept` is 0. In a state group, the table of a sequence has
    one entry, the running state. A sequence that resumes after `checkpoint` blocks, or awaits the
    blocks after them, has all blocks that follow. One that computes them has at most as many as it
    ever holds."""
    num_blocks = layout.blocks_of(num_tokens)
    has_rest = 0 < checkpoint * layout.block_size <= resume
    spans = []
    for group in layout.groups:
        if group.has_states and not is_chain:
            spans.append((0, 0, 1))
            continue
        first = group.first_seen(resume)
        kept = min(group.kept_blocks, first)
        end = num_blocks
        if group.window is not None and not has_rest:
            end = min(num_blocks, first + _most_held(group, num_blocks, checkpoint) - kept)
        spans.append((kept, first, end))
    return spans


def _most_held(group: KvGroup, num_blocks: int, checkpoint: int) -> int:
    """Returns the largest number of blocks that a sequence of `num_blocks` blocks holds in a group
    with a window between steps, if frozen states after `checkpoint` blocks are transferred with it;
    0: none are."""
    assert group.decode_blocks is not None
    return group.decode_blocks - 1 + max(1, num_blocks - checkpoint if checkpoint else 1)


def _hot_prefixes(pool: BlockPool, blocks_max: int) -> list[list[bytes]]:
    """Returns the most recently used chains as lists of block hashes, each from its first block on.

    All chains together have at most `blocks_max` distinct blocks. The last chain may be cut short
    to keep this limit.
    """
    chains: list[list[bytes]] = []
    # Ids of the blocks in `chains`. If a block is in this set, all blocks before it in its chain
    # are too.
    taken: set[int] = set()
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
        chains.append([pool.hashes_of(block_id)[0] for block_id in chain])
    return chains
