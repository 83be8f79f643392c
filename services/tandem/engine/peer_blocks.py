"""Transfers cached blocks between workers without a sequence. The engine knows only the block
hashes of the transferred chain of blocks, not the tokens.

    worker      call             effect
    sender      hold_prefix      the chain is held: its cached blocks stay in the pool
                remove           the chain is dropped; its blocks may be evicted again
    receiver    import_blocks    the chain is imported: blocks are reserved for the pull
                commit           the pulled blocks are cached, and the chain is dropped
                remove           the chain is dropped, and the pulled blocks are freed

The stages of a hold:

    hold_prefix --> held (`Held` is reported)           the tiers have no more than the pool
       |-> waiting --> loading or held                  another load brings the missing blocks
       `-> loading -+-> held, with the loaded blocks
                    `-> held, without them              the load failed, stalled or took too long

No call waits for a block. `hold_prefix` and `import_blocks` reference cached blocks, and
`import_blocks` also takes FREE blocks. The blocks of a load for a peer come from FREE and CACHED
blocks, never from a sequence. If there are too few, fewer blocks are loaded. A load has a time
limit. So these transfers never make two workers wait for each other.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from tandem.common.kv_tiers import PEER_SHARE_MAX
from tandem.common.perf_model.soonest import load_seconds
from tandem.engine.cache.block_table import BlockTables, check_own, check_trusted
from tandem.engine.cache.kv_cache import BlockDemand, KvCache
from tandem.engine.report import PendingReport
from tandem.engine.tiers.jobs import Load
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import PeerLoadStats
from tandem.errors import InternalError

# Used as the parent hash of a chain's first block. A peer does not send the real parent hash, and
# none is needed.
_ROOT_UNKNOWN = b""
# A load for a peer is given up after this multiple of the time that the peer allows for it, but not
# before `_PATIENCE_MIN_S` seconds. The first block of a load may take much longer than the others.
_PATIENCE = 2.0
_PATIENCE_MIN_S = 0.25


@dataclass(slots=True)
class PeerChain:
    """The blocks of a held or imported chain. The first `num_cached_blocks` blocks have KV. In an
    imported chain, a pull fills the other blocks; in a held chain, a load from tiers does."""

    tables: BlockTables
    block_hashes: list[bytes]  # one hash for each block of the tables
    num_cached_blocks: int
    is_imported: bool
    num_loaded_blocks: int = 0  # number of blocks that a load from tiers fills or has filled


class _Hold(NamedTuple):
    """What a peer has asked for, until `Held` is reported."""

    block_hashes: list[bytes]
    first_wanted_block: int
    load_s_max: float
    since: float  # in seconds of the tiers' clock
    until: float


class PeerBlocks:
    """All held and imported chains of one engine. A chain is named by a sequence id."""

    def __init__(
        self, kv: KvCache, pending: PendingReport, tiers: Tiers, spare: Callable[[], list[int]]
    ) -> None:
        """The blocks of each new chain are reported to `pending`. `spare` returns, for each KV
        group, how many blocks of its pool a load for a peer leaves to the running sequences."""
        self._kv = kv
        self._pending = pending
        self._tiers = tiers
        self._spare = spare
        self._chains: dict[str, PeerChain] = {}
        self._unanswered: dict[str, _Hold] = {}  # the waiting and the loading ones
        self._num_loads: Counter[str] = Counter()  # result of a load -> number of loads
        self._load_s = 0.0
        self._num_loaded = 0

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._chains

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def num_imports(self) -> int:
        return sum(chain.is_imported for chain in self._chains.values())

    @property
    def tables(self) -> list[BlockTables]:
        return [chain.tables for chain in self._chains.values()]

    @property
    def stats(self) -> PeerLoadStats:
        return PeerLoadStats(dict(self._num_loads), self._load_s, self._num_loaded)

    def block_ids(self, sequence_id: str) -> list[int]:
        return self._kv.global_ids(self._chains[sequence_id].tables)

    def hold_prefix(
        self,
        sequence_id: str,
        block_hashes: list[bytes],
        first_wanted_block: int,
        load_s_max: float = 0.0,
    ) -> None:
        """References the longest cached prefix of the chain, so that these blocks are not evicted
        before `remove`.

        If the tiers have more of the chain than the pool, these blocks are loaded first, provided
        that this is expected to take at most `load_s_max` seconds.

        In a model with sliding windows, the whole chain must be cached; otherwise no block is
        referenced. The consumer resumes at the end of the chain, and needs the blocks in the
        windows there. The windows at the end of a shorter prefix have other blocks.
        """
        now = self._tiers.clock()
        until = now + max(_PATIENCE_MIN_S, _PATIENCE * load_s_max)
        hold = _Hold(block_hashes, first_wanted_block, load_s_max, now, until)
        if load_s_max > 0 and self._tiers.tiers:
            self._begin(sequence_id, hold)
        else:
            self._answer(sequence_id, hold)

    @property
    def has_work(self) -> bool:
        """True if `settle` would change something."""
        return any(self._is_due(*each) for each in self._unanswered.items())

    def settle(self) -> None:
        """Gives up loads that take too long, and goes on with holds that need not wait any
        longer."""
        for sequence_id, hold in list(self._unanswered.items()):
            if not self._is_due(sequence_id, hold):
                continue
            if self._chains[sequence_id].num_loaded_blocks:
                self._give_up(sequence_id, "given_up", self._tiers.cancel_load(sequence_id))
            else:
                del self._unanswered[sequence_id]
                self._begin(sequence_id, hold)

    def take_load(self, load: Load) -> None:
        """Answers a hold whose load has ended."""
        sequence_id = load.sequence_id
        if not load.is_whole:
            self._give_up(sequence_id, "failed", ())
            return
        hold = self._unanswered.pop(sequence_id)
        chain = self._chains[sequence_id]
        depth = len(chain.block_hashes)
        self._kv.store(
            chain.tables,
            chain.block_hashes,
            chain_root=_ROOT_UNKNOWN,
            first=chain.num_cached_blocks,
            last=depth,
            resumable=[depth],
        )
        chain.num_cached_blocks = depth
        self._count(hold, "loaded")
        self._num_loaded += len(load.parts)
        self._pending.held(sequence_id, chain.tables, depth, hold.first_wanted_block)

    def _is_due(self, sequence_id: str, hold: _Hold) -> bool:
        if self._tiers.clock() >= hold.until:
            return True
        if self._chains[sequence_id].num_loaded_blocks:
            return sequence_id in self._tiers.find_stalled()
        return not self._tiers.is_loading(hold.block_hashes, self._kv.match(hold.block_hashes))

    def _begin(self, sequence_id: str, hold: _Hold) -> None:
        """Starts a load for the hold, lets it wait for another load, or answers it."""
        depth = self._kv.match(hold.block_hashes)
        may_load = depth < len(hold.block_hashes) and self._tiers.clock() < hold.until
        if may_load and self._tiers.is_loading(hold.block_hashes, depth):
            self._chains[sequence_id] = PeerChain(BlockTables(), [], 0, is_imported=False)
            self._unanswered[sequence_id] = hold
            return
        end = self._end_of_load(hold, depth) if may_load else depth
        if end <= depth or (end <= hold.first_wanted_block and not self._kv.has_windows):
            self._answer(sequence_id, hold)
            return
        chain = self._take(
            sequence_id, hold.block_hashes[:end], depth, is_imported=False, loaded=end
        )
        self._unanswered[sequence_id] = hold
        self._tiers.load(sequence_id, chain.block_hashes, self._kv.unfilled(chain.tables, end))

    def _end_of_load(self, hold: _Hold, depth: int) -> int:
        """Returns the index after the last block to load; at most `depth` if none is loaded."""
        hashes = hold.block_hashes
        reach = self._tiers.reach(hashes, depth)
        least = len(hashes) if self._kv.has_windows else depth + 1
        ends = sorted({each.num_blocks for each in reach if each.num_blocks >= least}, reverse=True)
        queue_s = self._tiers.queued_s
        in_time = [
            end for end in ends if queue_s + load_seconds(reach, depth, end) <= hold.load_s_max
        ]
        if not in_time:
            if ends:
                self._count(hold, "too_slow")
                self._tiers.decline()
            return depth
        num_loaded = sum(chain.num_loaded_blocks for chain in self._chains.values())
        # The blocks of a load that was given up count as long as the load may write to them.
        num_taken = num_loaded + self._tiers.num_fenced
        share = int(PEER_SHARE_MAX * self._kv.pools[0].num_blocks) - num_taken
        most = min(in_time[0], depth + share)
        end = self._kv.room_for_load(hashes, depth, most, self._spare())
        if self._kv.has_windows and end < len(hashes):
            end = depth
        if end <= depth:
            self._count(hold, "no_room")
        return end

    def _answer(self, sequence_id: str, hold: _Hold) -> None:
        depth = self._kv.match(hold.block_hashes)
        if self._kv.has_windows and depth < len(hold.block_hashes):
            depth = 0
        chain = self._take(sequence_id, hold.block_hashes[:depth], depth, is_imported=False)
        self._pending.held(sequence_id, chain.tables, depth, hold.first_wanted_block)

    def _give_up(self, sequence_id: str, result: str, unsafe_blocks: Collection[int]) -> None:
        """Answers a hold without the blocks of its load. The load may still write to
        `unsafe_blocks`."""
        hold = self._unanswered.pop(sequence_id)
        self._count(hold, result)
        self._kv.release(self._chains.pop(sequence_id).tables, unsafe_blocks)
        self._answer(sequence_id, hold)

    def _count(self, hold: _Hold, result: str) -> None:
        self._num_loads[result] += 1
        self._load_s += self._tiers.clock() - hold.since

    def import_blocks(self, sequence_id: str, block_hashes: list[bytes]) -> None:
        """References the longest cached prefix of the chain, and reserves FREE blocks for the rest
        of the chain. If there are too few FREE blocks, the end of the chain is left out; a model
        with sliding windows then reserves no block at all."""
        depth = self._kv.match(block_hashes)
        room = self._kv.room_for_import(block_hashes, depth)
        chain = self._take(sequence_id, block_hashes[:room], depth, is_imported=True)
        size = len(chain.block_hashes)
        self._pending.reserved(
            sequence_id, chain.tables, num_cached=depth, num_blocks=size, depth=size
        )

    def _take(
        self,
        sequence_id: str,
        block_hashes: list[bytes],
        depth: int,
        *,
        is_imported: bool,
        loaded: int = 0,
    ) -> PeerChain:
        num_tokens = len(block_hashes) * self._kv.layout.block_size
        demand = BlockDemand(
            num_tokens=num_tokens,
            resume=num_tokens,
            block_hashes=block_hashes,
            depth=depth,
            loaded=loaded,
            is_chain=True,
        )
        tables = self._kv.reserve(demand)
        assert tables is not None, "its blocks were counted"
        chain = PeerChain(tables, block_hashes, depth, is_imported, max(0, loaded - depth))
        self._chains[sequence_id] = chain
        return chain

    def commit(self, sequence_id: str, num_blocks: int, unsafe_blocks: Collection[int]) -> None:
        """Caches the first `num_blocks` blocks of an imported chain, whose KV is complete and
        trusted. Then removes the chain.

        Raises InternalError, after removing the chain, if the arguments contradict the chain.
        """
        chain = self._chains.get(sequence_id)
        if chain is None or not chain.is_imported:
            raise InternalError(f"no import of KV blocks with the id {sequence_id} is in progress")
        num_cached = chain.num_cached_blocks
        num_held = len(chain.block_hashes)
        try:
            check_trusted(sequence_id, num_blocks, num_cached, num_held)
            if self._kv.has_windows and num_blocks < num_held:
                num_blocks = num_cached  # an incomplete chain has no use with sliding windows
            check_own(sequence_id, self._kv.global_ids(chain.tables, num_blocks), unsafe_blocks)
            self._kv.store(
                chain.tables,
                chain.block_hashes,
                chain_root=_ROOT_UNKNOWN,
                first=num_cached,
                last=num_blocks,
                resumable=[num_blocks],
            )
            chain.num_cached_blocks = num_blocks
        finally:
            self.remove(sequence_id, unsafe_blocks)
        self._pending.forget(sequence_id)

    def remove(self, sequence_id: str, unsafe_blocks: Collection[int]) -> None:
        chain = self._chains[sequence_id]
        unsafe_blocks = [*unsafe_blocks, *self._tiers.cancel_load(sequence_id)]
        if (hold := self._unanswered.pop(sequence_id, None)) and chain.num_loaded_blocks:
            self._count(hold, "cancelled")
        own = self._kv.global_ids(chain.tables, chain.num_cached_blocks)
        check_own(sequence_id, own, unsafe_blocks)
        del self._chains[sequence_id]
        self._kv.release(chain.tables, unsafe_blocks)
