"""The KV tiers of a simulated worker: host memory, disk and object store. The simulated tiers
contain no data, but use the engine's slot tables, policies and measured rates (`engine/tiers`).

When a worker has prefilled, loaded or pulled blocks, it writes them to each tier whose policy
accepts them. This takes no time. If loading is the fastest way to get the blocks of the next task,
they are loaded from tiers into the KV pool. The time of a load follows from the true rates. A load
reads from one tier after another, slowest first, and in each tier it waits for earlier loads.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.common.kv_tiers import DISK, STORE
from tandem.common.perf_model.rates import PrefillRate, TierRate
from tandem.common.perf_model.soonest import LoadChoice, Offer, Producer, Prompt, choose_soonest
from tandem.engine.cache.block_table import UnfilledBlocks
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.tiers.slots.keep_policy import keep_policy
from tandem.engine.tiers.sources import Sources, Tables
from tandem.engine.tiers.storage import Bytes, Entry, Storage
from tandem.engine.tiers.tier import Tier
from tandem.engine.types import TierBlocks


@dataclass(slots=True, eq=False)
class TierRead:
    """A load of consecutive blocks of one prompt, from one or several tiers."""

    first: int  # index of the first block to load; the prompt's first block has the index 0
    end: int  # index of the last block to load, plus 1
    ends_s: float
    seconds: dict[int, float]  # tier number -> seconds to read from this tier
    num_blocks: Counter[int]  # tier number -> number of blocks to read from this tier
    tables: Tables
    is_done: bool = False


class WorkerTiers:
    """The tiers of one worker, fastest first.

    `rates` and `prefill` are the true rates. `num_blocks` is the number of blocks that each tier
    can hold. `in_store` has the hashes of the blocks in the object store; all workers share this
    set.
    """

    def __init__(
        self,
        rates: Sequence[TierRate],
        num_blocks: Sequence[int],
        *,
        policy: str,
        prefill: PrefillRate,
        block_size: int,
        in_store: set[bytes],
    ) -> None:
        layout = KvLayout.of_one(BlockLayout(1, 1, 1, block_size, 1, "int8"))
        self._tiers = [
            Tier(number, [_Slots(rate.name, count)], keep_policy(policy, count, block_size), layout)
            for number, (rate, count) in enumerate(zip(rates, num_blocks, strict=True))
        ]
        for tier in self._tiers:
            tier.take_rate(prefill)
        self._block_s = [rate.block_s for rate in rates]
        self._sources = Sources(layout, [], self._tiers)
        self._in_store = in_store
        self._store = next((tier for tier in self._tiers if tier.storage.name == STORE), None)
        self._free_s = [0.0] * len(self._tiers)

    @property
    def names(self) -> list[str]:
        return [tier.storage.name for tier in self._tiers]

    def plan(
        self,
        prompt: Prompt,
        block_hashes: Sequence[bytes],
        now_s: float,
        *,
        offer: Offer | None = None,
        producer: Producer | None = None,
    ) -> LoadChoice | None:
        """Returns the range of a prompt's blocks that should be loaded from tiers, or None if
        another way is faster. A tier that was never used is expected to load in no time, so its
        first load is always made, and the speed is known afterwards."""
        self._look_up(block_hashes)
        reach = self._sources.reach(block_hashes, prompt.num_held, self._tiers)
        if max(tier.num_blocks for tier in reach) <= prompt.num_held:
            return None
        choice = choose_soonest(
            prompt,
            reach,
            load_queue_s=self.queue_s(now_s),
            offer=offer,
            producer=producer,
            pulls_rest=False,
        )
        return choice if choice.loads else None

    def has_more(self, block_hashes: Sequence[bytes], num_held: int) -> bool:
        """Returns whether a tier has more of the prompt's leading blocks than `num_held`."""
        return any(tier.depth(block_hashes) > num_held for tier in self._tiers)

    def decline(self) -> None:
        """Records that a load was possible but expected to be slower than another way. Each call
        lowers the tiers' expected load times a little. So after many calls a load is tried again,
        and the tiers' speed is measured again."""
        for tier in self._tiers:
            tier.rate.decline()

    def begin_load(
        self, block_hashes: Sequence[bytes], choice: LoadChoice, now_s: float
    ) -> TierRead:
        """Starts the load of the blocks that `plan` returned."""
        indices = range(choice.first, choice.end)
        wanted = [UnfilledBlocks(0, indices, [0] * len(indices))]
        parts, tables = self._sources.find_parts(block_hashes, wanted, self._tiers)
        num_blocks = Counter(part.tier for part in parts)
        seconds = {tier: count * self._block_s[tier] for tier, count in num_blocks.items()}
        ends_s = now_s
        for tier in reversed(seconds):
            self._free_s[tier] = ends_s = max(ends_s, self._free_s[tier]) + seconds[tier]
        return TierRead(choice.first, choice.end, ends_s, seconds, num_blocks, tables)

    def load_for_peer(
        self, block_hashes: Sequence[bytes], num_held: int, now_s: float
    ) -> TierRead | None:
        """Starts the load of a chain's blocks after the first `num_held` ones, for a peer. Returns
        None if the tiers do not have all of them."""
        if not self.has_more(block_hashes, len(block_hashes) - 1):
            return None
        choice = LoadChoice(num_held, len(block_hashes), False, 0.0, 0.0, 0.0)
        return self.begin_load(block_hashes, choice, now_s)

    def end_load(self, load: TierRead) -> dict[str, int]:
        """Ends a load. Returns a dict: tier name -> number of blocks that were loaded from this
        tier."""
        self.release_load(load)
        for number, count in load.num_blocks.items():
            tier = self._tiers[number]
            tier.num_loaded += count
            tier.rate.observe(count, load.seconds[number])
        return {self._tiers[number].storage.name: n for number, n in load.num_blocks.items()}

    def release_load(self, load: TierRead) -> None:
        """Releases the slots of the tiers that a load reads. The load is done or was cancelled."""
        for (tier, group), table in load.tables.items():
            self._tiers[tier].groups[group].pool.release(table)

    def queue_s(self, now_s: float) -> float:
        """Returns the seconds until all running loads have ended."""
        return max(0.0, max(self._free_s) - now_s)

    def use(self, block_hashes: Sequence[bytes], *, keep: bool) -> None:
        """Records that a sequence used these blocks. `keep`: True if a later request will probably
        use the blocks again."""
        for tier in self._tiers:
            tier.policy.use(block_hashes, keep=keep)

    def write(self, block_hashes: Sequence[bytes], new: Iterable[bytes]) -> None:
        """Writes blocks of a prompt to the tiers: the blocks in `new`, and the blocks of which no
        tier has a copy."""
        fresh = set(new)
        parent_hash = b""
        for block_hash in block_hashes:
            if block_hash in fresh or not self._has(block_hash):
                self._write(Entry(block_hash, parent_hash))
            parent_hash = block_hash
        for tier in self._tiers:
            tier.groups[0].follow_evictions()

    def take_events(self) -> list[TierBlocks]:
        """Returns the changes of each tier since the last call."""
        return [tier.take_events() for tier in self._tiers if tier.has_events]

    def restart(self) -> None:
        """Simulates a restart of the worker. The disk keeps its blocks, and host memory is empty.
        The worker has forgotten which blocks the object store has."""
        self._free_s = [0.0] * len(self._tiers)
        for tier in self._tiers:
            if tier.storage.name != DISK:
                tier.pool.drop_cached()
            tier.groups[0].follow_evictions()
            tier.take_events()

    def num_loaded(self) -> dict[str, int]:
        """Returns a dict: tier name -> number of blocks loaded from this tier so far."""
        return {tier.storage.name: tier.num_loaded for tier in self._tiers}

    def held(self) -> dict[str, list[bytes]]:
        """Returns a dict: tier name -> hashes of the blocks in this tier."""
        return {tier.storage.name: tier.block_hashes(b"", b"") for tier in self._tiers}

    def check_integrity(self) -> None:
        """Raises AssertionError if the slot tables contradict each other, or if a load holds a
        slot. Must be called while no load is running."""
        for tier in self._tiers:
            tier.pool.check_integrity([])

    def _look_up(self, block_hashes: Sequence[bytes]) -> None:
        """Asks the object store which leading blocks of a prompt it has, and remembers the answer,
        as the engine does."""
        if self._store is None:
            return
        known = self._store.depth(block_hashes)
        end = known
        while end < len(block_hashes) and block_hashes[end] in self._in_store:
            end += 1
        chain = zip((b"", *block_hashes), block_hashes[:end], strict=False)
        entries = [Entry(block_hash, parent_hash) for parent_hash, block_hash in chain]
        self._store.groups[0].learn(entries[known:])
        self._store.groups[0].follow_evictions()

    def _has(self, block_hash: bytes) -> bool:
        return any(tier.pool.has(block_hash) for tier in self._tiers)

    def _write(self, entry: Entry) -> None:
        for tier in self._tiers:
            target = tier.groups[0].target(entry)
            if target is not None:
                target.is_written = True
                tier.settle(0, entry, target, is_current=True)
                if tier is self._store:
                    self._in_store.add(entry.block_hash)


class _Slots(Storage):
    """A storage with slots but without data."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self.num_slots = num_slots

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        """Does nothing."""

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        """Does nothing."""

    def forget(self) -> None:
        """Does nothing."""

    def entries(self) -> list[tuple[int, Entry]]:
        return []

    def close(self) -> None:
        """Does nothing."""
