"""The KV pools of all groups as one: what a sequence holds of each, and what a request may reuse.

A hit at depth d (blocks) counts if the full group has blocks [0, d) and each group with a window
has those of [0, d) that the token after them sees; `match` finds the largest such d.

A table covers a span of blocks in each group. Without a window it begins at block 0. With one it
begins at the first block that the next token sees: `pass_by` gives back what the window has passed,
and `extend` takes what comes next. Ids in tables are of their group's pool; all who talk to the
outside use ids that are unique among the pools (layout/kv_groups.py).
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from tandem.common.adapter import Adapter
from tandem.common.kv_budget import KvBudget
from tandem.common.perf_model.rates import WindowBytes, WorkerRates
from tandem.common.worker_load import GroupLoad
from tandem.engine.cache.block_copy import BlockCopy, BlockPart
from tandem.engine.cache.block_table import NULL_BLOCK, BlockTables, UnfilledBlock
from tandem.engine.cache.heavy_hitters import HeavyHitters
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.cache.pool.window_pool import WindowPool
from tandem.engine.cache.resumable_depths import ResumableChains, ResumableDepths
from tandem.engine.types import BlockChanges, StoredBlock

_LISTED_PER_BLOCK_MAX = 16  # bounds how often long shared prefixes are repeated


class KvCache:
    def __init__(self, layout: KvLayout, *, report_tokens: bool = False) -> None:
        """`report_tokens`: the events of stored blocks have their token ids."""
        self.layout = layout
        self._block_size = layout.block_size
        self.pools: list[BlockPool] = [
            (BlockPool if group.window is None else WindowPool)(
                group.layout.num_blocks, report_tokens=report_tokens
            )
            for group in layout.groups
        ]
        self._depths = ResumableDepths(layout) if layout.has_windows else None
        has_chains = report_tokens and layout.has_windows and layout.groups[0].window is None
        self._chains = ResumableChains() if has_chains else None
        self._chain_changes: BlockChanges | None = None  # since events were taken last
        self.has_windows = layout.has_windows

    def rates(self, step_tokens: int) -> WorkerRates:
        """Returns the rates of a worker with these pools before it has measured any."""
        windows = tuple(
            WindowBytes(group.decode_blocks, group.layout.block_bytes)
            for group in self.layout.groups
            if group.decode_blocks is not None
        )
        return WorkerRates(
            step_tokens=step_tokens, block_bytes=self.layout.block_bytes, windows=windows
        )

    def match(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many first blocks of a chain need not be computed. References nothing."""
        depth = len(block_hashes)
        for group, pool in zip(self.layout.groups, self.pools, strict=True):
            if group.window is None:
                depth = len(pool.match(block_hashes[:depth]))
        return self.layout.deepest_hit(block_hashes, depth, self._has)

    def _has(self, group: int, block_hash: bytes) -> bool:
        return self.pools[group].find(block_hash) is not None

    def find_beginning(self, parent_hash: bytes, token_ids: Sequence[int]) -> BlockPart | None:
        """Returns the part of a cached block that has the first ones of these tokens after a chain
        that ends with `parent_hash`; None if no block has the first. References nothing."""
        for num_tokens, block_hash in self.pools[0].children.closest(parent_hash, token_ids):
            found = [pool.find(block_hash) for pool in self.pools]
            sources = tuple(block_id for block_id in found if block_id is not None)
            if len(sources) == len(found):
                return BlockPart(num_tokens, sources)
        return None

    def reserve(
        self,
        block_hashes: Sequence[bytes],
        depth: int,
        *,
        num_tokens: int,
        resume: int,
        sources: Sequence[int] = (),
        budget: KvBudget | None = None,
        loaded: int = 0,
    ) -> BlockTables | None:
        """References what is cached of the chain's first `depth` blocks, and allocates the rest.
        If its first `loaded` blocks come from tiers, it references what is here of those.

        `sources` are blocks of each group that will be copied into the first of the rest, if the
        table begins before it. They are referenced, too, until `end_copies`.

        The tables cover a sequence of `num_tokens` tokens from what the token after `resume` others
        sees; with a window, as far as a decode step needs it at least. None when there is no room
        for all of it; then nothing changed. With a KV budget nothing is cached.
        """
        if not self.can_reserve(
            block_hashes,
            depth,
            num_tokens=num_tokens,
            resume=resume,
            sources=sources,
            budget=budget,
            loaded=loaded,
        ):
            return None
        layout = self._layout_under(budget)
        tables = BlockTables()
        if budget is not None and budget.keeps_hitters:
            tables.hitters = HeavyHitters(budget, self._block_size)
        elif budget is not None:
            tables.budget = layout
        spans = _spans(layout, _most_kept(budget, num_tokens), resume)
        for pool, (kept, first, end), source in zip(
            self.pools, spans, self._copied(sources, spans, depth), strict=True
        ):
            hashes = block_hashes[first : max(depth, loaded)]
            size = kept + end - first
            if loaded and isinstance(pool, WindowPool):
                blocks = pool.reserve_any(hashes, size)
                assert blocks is not None
            else:
                found = pool.reserve(hashes, size, source)
                assert found is not None
                num_cached = found.num_cached_blocks
                assert loaded or num_cached == max(0, depth - first), "there was no such hit"
                blocks = found.block_table
            tables.ids.append(blocks[:kept] + [NULL_BLOCK] * (first - kept) + blocks[kept:])
            tables.firsts.append(first)
            tables.kept.append(kept)
        return tables

    def can_reserve(
        self,
        block_hashes: Sequence[bytes],
        depth: int,
        *,
        num_tokens: int,
        resume: int,
        sources: Sequence[int] = (),
        budget: KvBudget | None = None,
        loaded: int = 0,
    ) -> bool:
        """Returns whether there is room for what `reserve` would take."""
        spans = _spans(self._layout_under(budget), _most_kept(budget, num_tokens), resume)
        for pool, (kept, first, end), source in zip(
            self.pools, spans, self._copied(sources, spans, depth), strict=True
        ):
            hashes = block_hashes[first : max(depth, loaded)]
            size = kept + end - first
            if loaded and isinstance(pool, WindowPool):
                fits = pool.can_reserve_any(hashes, size)
            else:
                fits = pool.can_reserve(hashes, size, source)
            if not fits:
                return False
        return True

    def unfilled(self, tables: BlockTables, end: int) -> list[UnfilledBlock]:
        """Returns what of the tables' blocks before index `end` has no KV yet, group by group."""
        return [
            UnfilledBlock(number, index, ids[index])
            for number, (pool, ids, first) in enumerate(
                zip(self.pools, tables.ids, tables.firsts, strict=True)
            )
            for index in range(first, end)
            if pool.is_writable(ids[index])
        ]

    def want_copies(self, block_hashes: Sequence[bytes]) -> None:
        """A request may go on after this chain, or after all but its last block: lets tiers copy
        what it needs then of windows."""
        resume = (len(block_hashes) - 1) * self.layout.block_size
        for group, pool in zip(self.layout.groups, self.pools, strict=True):
            if block_hashes and isinstance(pool, WindowPool):
                pool.want_copies(block_hashes[group.first_seen(resume) :])

    def end_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Drops the references to blocks that were copied."""
        for copy in copies:
            self.pools[copy.group].release([copy.source])

    def _copied(
        self, sources: Sequence[int], spans: Sequence[tuple[int, int, int]], depth: int
    ) -> list[int | None]:
        """Returns the block that is copied in each group."""
        if not sources:
            return [None] * len(spans)
        pairs = zip(sources, spans, strict=True)
        return [source if first <= depth else None for source, (_, first, _) in pairs]

    def _layout_under(self, budget: KvBudget | None) -> KvLayout:
        has_window = budget is not None and not budget.keeps_hitters
        return self.layout.under(budget) if budget is not None and has_window else self.layout

    def passes(self, tables: BlockTables) -> bool:
        """Returns whether `pass_by` may give back blocks of the tables."""
        return self.has_windows or tables.budget is not None

    def room_for_import(self, block_hashes: Sequence[bytes], depth: int) -> int:
        """Returns how long a chain of these blocks may be if it evicts nothing and `depth` of them
        are cached. With windows that is all of it or what is cached."""
        num_blocks = len(block_hashes)
        num_tokens = num_blocks * self.layout.block_size
        spans = _spans(self.layout, num_tokens, num_tokens)
        room = min(
            max(first, depth) + pool.num_free
            for pool, (_, first, _) in zip(self.pools, spans, strict=True)
        )
        return min(room, num_blocks) if room >= num_blocks or not self.has_windows else depth

    def extend(self, tables: BlockTables, num_tokens: int) -> int:
        """Lets the tables cover `num_tokens` tokens; returns how many they cover, maybe fewer."""
        size = self._block_size
        passed = tables.num_passed_tokens
        num_blocks = covered = -(-(num_tokens - passed) // size)
        for pool, ids in zip(self.pools, tables.ids, strict=True):
            while len(ids) < num_blocks:
                taken = pool.allocate(1)
                if taken is None:
                    break
                ids += taken
            covered = min(covered, len(ids))
        return min(num_tokens, covered * size + passed)

    def pass_by(self, tables: BlockTables, num_tokens: int) -> None:
        """Gives back what no token sees that comes after `num_tokens` others."""
        for number, group in enumerate((tables.budget or self.layout).groups):
            if group.window is None:
                continue
            ids = tables.ids[number]
            first = tables.firsts[number]
            end = min(group.first_seen(num_tokens), len(ids))
            if end > first:
                pool = self.pools[number]
                kept = tables.kept[number] = min(group.kept_blocks, end)
                passed = ids[max(first, kept) : end]
                if isinstance(pool, WindowPool):
                    pool.release_passed(passed)
                else:
                    pool.release(passed)  # FREE: a budget's blocks have no hashes
                ids[max(first, kept) : end] = [NULL_BLOCK] * len(passed)
                tables.firsts[number] = end

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
        """Lets others find blocks first..last - 1 of the tables, those before them being stored.

        A block that is there already takes the place of a table's own. `block_tokens` are the token
        ids of a block, by its index, if they are known, and `adapter` only goes into the events. A
        request may go on after each of `resumable` blocks.
        """
        for group, pool, ids, held in zip(
            self.layout.groups, self.pools, tables.ids, tables.firsts, strict=True
        ):
            for i in range(max(first, held), last):
                if pool.find(block_hashes[i]) == ids[i]:
                    continue  # it was here when others were loaded
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

    def give_back(self, tables: BlockTables, unsafe: Collection[int] = ()) -> None:
        """Drops the tables' references; `unsafe` blocks wait in quarantine until they are safe."""
        for number, quarantined in enumerate(self._by_group(unsafe)):
            if tables:
                pool = self.pools[number]
                pool.quarantine(quarantined)
                pool.release([b for b in tables.held(number) if b not in quarantined])

    def replace(self, tables: BlockTables, unsafe: Collection[int]) -> bool:
        """Quarantines blocks of the tables, and puts others in their place. False, and nothing
        changed, when there are too few."""
        by_group = self._by_group(unsafe)
        if any(
            len(blocks) > pool.num_available
            for pool, blocks in zip(self.pools, by_group, strict=True)
        ):
            return False
        for pool, blocks, ids in zip(self.pools, by_group, tables.ids, strict=True):
            fresh = pool.allocate(len(blocks))
            assert fresh is not None
            others = dict(zip(blocks, fresh, strict=True))
            pool.quarantine(blocks)
            ids[:] = [others.get(b, b) for b in ids]
        return True

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """Frees quarantined blocks, which no read writes any more; ignores other blocks."""
        for pool, blocks in zip(self.pools, self._by_group(block_ids), strict=True):
            pool.unquarantine(blocks)

    def global_ids(self, tables: BlockTables, first: int = 0) -> list[int]:
        """Returns what the tables hold from the index `first` on, group after group."""
        return [
            start + block
            for number, start in enumerate(self.layout.first_ids)
            if tables
            for block in tables.held(number, first)
        ]

    def _by_group(self, block_ids: Iterable[int]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.pools]
        for block_id in dict.fromkeys(block_ids):
            group, local = self.layout.locate(block_id)
            found[group].append(local)
        return found

    def drop_cached(self) -> int:
        """Frees every CACHED block, so that `match` finds USED ones only; returns how many."""
        return sum(pool.drop_cached() for pool in self.pools)

    @property
    def num_quarantined(self) -> int:
        return sum(pool.num_quarantined for pool in self.pools)

    def group_loads(self) -> tuple[GroupLoad, ...]:
        """Returns the load of each pool; nothing without windows, where there is one pool."""
        if not self.has_windows:
            return ()
        return tuple(
            GroupLoad(pool.num_blocks, pool.num_used, group.decode_blocks or 0)
            for group, pool in zip(self.layout.groups, self.pools, strict=True)
        )

    @property
    def has_events(self) -> bool:
        return any(pool.has_events for pool in self.pools)

    def take_events(self) -> tuple[list[StoredBlock], list[bytes]]:
        """Returns net changes since last time: (stored, parents first; removed, children first).

        With windows they are of the blocks after which a request may go on.
        """
        events = [pool.take_events() for pool in self.pools]
        if self._depths is None:
            return events[0]
        resumable = self._depths.update(events)
        if self._chains is not None:
            self._chain_changes = self._chains.update(events[0], resumable)
        return resumable

    def take_chain_changes(self) -> BlockChanges | None:
        """Returns the changes of `ResumableChains` that belong to the events just taken; None
        without windows, without `report_tokens`, or if no group has whole chains."""
        changes, self._chain_changes = self._chain_changes, None
        return changes

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Hashes that events told of, from `first` on and before `end`; empty `end`: to the
        last."""
        if self._depths is None:
            return self.pools[0].block_hashes(first, end)
        return self._depths.block_hashes(first, end)

    def hot_prefixes(self, blocks_max: int) -> list[list[bytes]]:
        """Hashes of the most lately used chains, each from its root to where it can be resumed."""
        if self.layout.groups[0].window is not None:
            return []  # its pool knows no chains
        chains = _hot_prefixes(self.pools[0], blocks_max)
        return [cut for chain in chains if (cut := chain[: self.match(chain)])]

    def check_integrity(self, tables: Iterable[BlockTables]) -> None:
        """Raises AssertionError naming what is wrong; `tables` are all that reference."""
        held = [each for each in tables if each]
        for number, pool in enumerate(self.pools):
            for each in held:
                passed = each.ids[number][each.kept[number] : each.firsts[number]]
                assert set(passed) <= {NULL_BLOCK}, "a passed block is named"
            pool.check_integrity(each.held(number) for each in held)


def _most_kept(budget: KvBudget | None, num_tokens: int) -> int:
    """Returns the most tokens that a sequence keeps at once while so many are computed."""
    return min(num_tokens, budget.tokens) if budget and budget.keeps_hitters else num_tokens


def _spans(layout: KvLayout, num_tokens: int, resume: int) -> list[tuple[int, int, int]]:
    """Returns of a table in each group the number of its first blocks that stay, the first block
    after them, and the end."""
    num_blocks = layout.blocks_of(num_tokens)
    spans = []
    for group in layout.groups:
        first = group.first_seen(resume)
        least = group.decode_blocks
        kept = min(group.kept_blocks, first)
        end = num_blocks if least is None else min(num_blocks, first + least - kept)
        spans.append((kept, first, end))
    return spans


def _hot_prefixes(pool: BlockPool, blocks_max: int) -> list[list[bytes]]:
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
