"""Looks up how many blocks of a waiting prompt are in the object store. Other workers write to the
store too.

    WAITING --look-up starts--> waits --result, or deadline--> admitted with the blocks found so far

A worker knows the blocks that it wrote or found itself. It keeps no list of other workers' blocks,
because a store may have millions. Instead it looks up each prompt. This takes a single short
request if the prompt is not stored. A prompt waits only for a small fraction of its compute time. A
result that comes too late helps later prompts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue

from tandem.common.retention import PRIORITY_MIN
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.tiers.io_thread import JobThread
from tandem.engine.tiers.object_store.search import Found, search
from tandem.engine.tiers.storage import Entry, SharedStorage
from tandem.engine.tiers.tier import LoadRate, Tier, TierGroup

log = logging.getLogger(__name__)

# A prompt waits at most this fraction of the time to compute its missing blocks.
WAIT_SHARE = 0.1
WAIT_S_MAX = 1.0
_AT_ONCE = 4  # number of found blocks that `settle` adds between two checks of the clock


@dataclass(slots=True)
class _Lookup:
    storages: Sequence[SharedStorage]  # one for each KV group
    layout: KvLayout
    block_hashes: Sequence[bytes]
    # Number of leading blocks that this worker has or can load already. In the full-attention
    # group, the look-up starts after them.
    first: int
    clock: Callable[[], float]
    on_end: Callable[[_Lookup], object]
    deadline: float
    seconds: float = 0.0
    found: Found = field(default_factory=list)
    is_ended: bool = False

    def __call__(self) -> None:
        started = self.clock()
        try:
            self.found = search(self.storages, self.layout, self.block_hashes, self.first)
        except OSError as error:
            # After an error, the storage itself makes no requests for a while.
            log.debug("a look-up of blocks in the object store failed: %s", error)
        finally:
            self.seconds = self.clock() - started
            self.on_end(self)


class Lookups:
    def __init__(
        self,
        tiers: Sequence[Tier],
        start_thread: Callable[[str], JobThread],
        clock: Callable[[], float],
        layout: KvLayout,
        depth: Callable[[Sequence[bytes]], int],
    ) -> None:
        """Look-ups search the first of the `tiers` that workers share. `depth` returns how many
        leading blocks of a prompt, given by their hashes, are in the pool or in any tier."""
        self._layout = layout
        self._depth = depth
        self._tier = next((t for t in tiers if isinstance(t.storage, SharedStorage)), None)
        groups = self._tier.groups if self._tier else []
        self._storages = [g.storage for g in groups if isinstance(g.storage, SharedStorage)]
        self._thread = start_thread("store-lookups") if self._tier else None
        self._clock = clock
        self._lookups: dict[str, _Lookup] = {}  # look-ups of sequences, by sequence id
        self._ended: SimpleQueue[_Lookup] = SimpleQueue()
        self._num_in_flight = 0
        self._current: _Lookup | None = None  # the look-up whose result is being added
        self._unadded: deque[tuple[TierGroup, list[Entry]]] = deque()
        self._rate = LoadRate()  # measured seconds of a look-up

    @property
    def are_on(self) -> bool:
        """True if there is an object store."""
        return self._tier is not None

    @property
    def has_ended(self) -> bool:
        return self._current is not None or not self._ended.empty()

    @property
    def is_busy(self) -> bool:
        return self._num_in_flight > 0

    def awaits_answer(
        self, sequence_id: str, block_hashes: Sequence[bytes], cached: int, compute_s: float | None
    ) -> bool:
        """Starts a look-up of a sequence's prompt, if there was none. Returns whether the sequence
        should wait for the result.

        The first `cached` blocks are in the pool. Computing the other blocks takes `compute_s`
        seconds; None: unknown.
        """
        tier = self._tier
        if tier is None or self._thread is None:
            return False
        lookup = self._lookups.get(sequence_id)
        if lookup is not None:
            return not lookup.is_ended and self._clock() < lookup.deadline
        known = max(cached, self._depth(block_hashes))
        if known >= len(block_hashes) or not tier.storage.is_ready:
            return False
        wait_s = WAIT_S_MAX if compute_s is None else min(WAIT_S_MAX, WAIT_SHARE * compute_s)
        if self._rate.block_s > wait_s:
            self._rate.decline()
            return False
        deadline = self._clock() + wait_s
        lookup = _Lookup(
            self._storages,
            self._layout,
            block_hashes,
            known,
            self._clock,
            self._ended.put,
            deadline,
        )
        self._lookups[sequence_id] = lookup
        self._num_in_flight += 1
        self._thread.submit(lookup)
        return True

    def settle(self, until: float) -> None:
        """Adds the blocks that look-ups found to the tier, in small batches (`_open`). Stops after
        the batch during which `time.perf_counter` reaches `until`."""
        while self.has_ended:
            if self._current is None:
                self._open(self._ended.get_nowait())
            elif self._unadded:
                group, entries = self._unadded.popleft()
                group.learn(entries)
            else:
                self._current.is_ended = True
                self._current = None
                self._num_in_flight -= 1
            if time.perf_counter() >= until:
                return

    def _open(self, lookup: _Lookup) -> None:
        """Divides the result of a look-up into batches of `_AT_ONCE` blocks. `settle` adds one
        batch at a time."""
        self._current = lookup
        self._rate.observe(1, lookup.seconds)
        assert self._tier is not None
        links = list(pairwise((b"", *lookup.block_hashes)))
        # Each found block was used at least once, by the worker that wrote it. The priority of this
        # use is not known, so the lowest priority is assumed.
        if lookup.found:
            written = [lookup.block_hashes[i] for i in lookup.found[0]]
            self._tier.policy.use(written, keep=False, priority=PRIORITY_MIN)
        for group, indexes in zip(self._tier.groups, lookup.found, strict=False):
            entries = [Entry(links[i][1], links[i][0]) for i in indexes]
            parts = (entries[i : i + _AT_ONCE] for i in range(0, len(entries), _AT_ONCE))
            self._unadded += ((group, part) for part in parts)

    def forget(self, sequence_id: str) -> None:
        """Forgets the look-up of a sequence that left the engine."""
        self._lookups.pop(sequence_id, None)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close(0.0)
