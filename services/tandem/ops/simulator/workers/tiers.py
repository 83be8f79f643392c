"""The tiers of a simulated worker, with the engine's slot tables and policies but without data.

Blocks that were prefilled, loaded or pulled are written to each tier whose policy accepts them. If
loading is the fastest way for the next task, blocks are loaded from tiers into the KV pool.

Slots, policies and measured rates are those of `engine/tiers`. A write takes no time. A load takes
the time given by the true rates: it reads from the tiers one after another, slowest first, and
waits at each tier for earlier loads.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.common.kv_tiers import DISK, STORE
from tandem.common.perf_model.rates import PrefillRate, TierRate
from tandem.common.perf_model.soonest import LoadChoice, Offer, Producer, Prompt, choose_soonest
from tandem.engine.cache.block_table import UnfilledBlock
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.tiers.slots.keep_policy import keep_policy
from tandem.engine.tiers.sources import Sources, Tables
from tandem.engine.tiers.storage import Bytes, Entry, Storage
from tandem.engine.tiers.tier import Tier
from tandem.engine.types import TierBlocks


@dataclass(slots=True, eq=False)
class TierRead:
    """A load of consecutive blocks of one prompt from tiers."""

    first: int  # index of the first block
    end: int  # index after the last block
    ends_s: float
    seconds: dict[int, float]  # reading time by tier number
    num_blocks: Counter[int]  # number of blocks by tier number
    tables: Tables
    is_done: bool = False


class WorkerTiers:
    """The tiers of one worker, fastest first.

    `rates` and `prefill` are the true rates, and `num_blocks` is the capacity of each tier.
    `in_store` is a set that all workers share: the hashes of the blocks in the object store."""

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
        """Returns the blocks of a prompt to load; None if loading is not the fastest choice. The
        choice uses measured rates, so the first load from a tier is always made."""
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
        """Returns whether a tier has more than `num_held` leading blocks of the prompt."""
        return any(tier.depth(block_hashes) > num_held for tier in self._tiers)

    def decline(self) -> None:
        """Records that a possible load was not made, because another way was predicted to be
        faster."""
        for tier in self._tiers:
            tier.rate.decline()

    def begin_load(
        self, block_hashes: Sequence[bytes], choice: LoadChoice, now_s: float
    ) -> TierRead:
        """Starts the load that `plan` returned."""
        wanted = [UnfilledBlock(0, index, 0) for index in range(choice.first, choice.end)]
        parts, tables = self._sources.find_parts(block_hashes, wanted, self._tiers)
        num_blocks = Counter(part.tier for part in parts)
        seconds = {tier: count * self._block_s[tier] for tier, count in num_blocks.items()}
        ends_s = now_s
        for tier in reversed(seconds):
            self._free_s[tier] = ends_s = max(ends_s, self._free_s[tier]) + seconds[tier]
        return TierRead(choice.first, choice.end, ends_s, seconds, num_blocks, tables)

    def end_load(self, load: TierRead) -> dict[str, int]:
        """Ends a load; returns the number of loaded blocks by tier name."""
        self.release_load(load)
        for number, count in load.num_blocks.items():
            tier = self._tiers[number]
            tier.num_loaded += count
            tier.rate.observe(count, load.seconds[number])
        return {self._tiers[number].storage.name: n for number, n in load.num_blocks.items()}

    def release_load(self, load: TierRead) -> None:
        """Releases the slots of a load that is done or cancelled."""
        for (tier, group), table in load.tables.items():
            self._tiers[tier].groups[group].pool.release(table)

    def queue_s(self, now_s: float) -> float:
        """Returns the seconds until the current loads have ended."""
        return max(0.0, max(self._free_s) - now_s)

    def use(self, block_hashes: Sequence[bytes], *, keep: bool) -> None:
        """Records the use of blocks by a sequence. `keep`: True if the blocks are likely to be used
        again."""
        for tier in self._tiers:
            tier.policy.use(block_hashes, keep=keep)

    def write(self, block_hashes: Sequence[bytes], new: Iterable[bytes]) -> None:
        """Copies blocks of a prompt to the tiers: those in `new`, and those of which no tier has a
        copy."""
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
        """Simulates a restart of the worker, whose loads were cancelled. The disk keeps its
        contents, host memory is empty, and nothing is known about the object store."""
        self._free_s = [0.0] * len(self._tiers)
        for tier in self._tiers:
            if tier.storage.name != DISK:
                tier.pool.drop_cached()
            tier.groups[0].follow_evictions()
            tier.take_events()

    def num_loaded(self) -> dict[str, int]:
        """Returns the number of blocks loaded from each tier, by tier name."""
        return {tier.storage.name: tier.num_loaded for tier in self._tiers}

    def held(self) -> dict[str, list[bytes]]:
        """Returns the hashes of the blocks in each tier, by tier name."""
        return {tier.storage.name: tier.block_hashes(b"", b"") for tier in self._tiers}

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot is held or the slot tables are inconsistent. It must be
        called while no load is in progress."""
        for tier in self._tiers:
            tier.pool.check_integrity([])

    def _look_up(self, block_hashes: Sequence[bytes]) -> None:
        """Looks up which leading blocks of a prompt the object store has, as the engine does."""
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
