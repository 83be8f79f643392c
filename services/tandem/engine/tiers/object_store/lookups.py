"""Looks up how much of a waiting prompt a store has, which other workers write to as well.

    WAITING --await_answer--> asked --answer, or deadline--> admitted with what is known by then

A worker knows the blocks that it wrote or found. It keeps no list of what others wrote, and reads
none when it starts: a store may have millions. Instead it asks for the prompt at hand, and for one
that nobody wrote that is one short request. A prompt waits for it for a small part of the time that
computing takes. An answer that comes later is of use to the next prompt.
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

WAIT_SHARE = 0.1  # of the time to compute what may be there
WAIT_S_MAX = 1.0
_AT_ONCE = 4  # found blocks that are taken before the clock is looked at


@dataclass(slots=True)
class _Lookup:
    storages: Sequence[SharedStorage]  # of each KV group
    layout: KvLayout
    block_hashes: Sequence[bytes]
    first: int  # blocks of the group without a window that are known to be there
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
            log.debug("a look-up failed: %s", error)  # the storage is not ready for a while
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
        """`depth` says how many first blocks of a chain can be loaded."""
        self._layout = layout
        self._depth = depth
        self._tier = next((t for t in tiers if isinstance(t.storage, SharedStorage)), None)
        groups = self._tier.groups if self._tier else []
        self._storages = [g.storage for g in groups if isinstance(g.storage, SharedStorage)]
        self._thread = start_thread("store-lookups") if self._tier else None
        self._clock = clock
        self._asked: dict[str, _Lookup] = {}  # by sequence
        self._ended: SimpleQueue[_Lookup] = SimpleQueue()
        self._num_in_flight = 0
        self._taken: _Lookup | None = None  # of which the engine takes what was found
        self._untaken: deque[tuple[TierGroup, list[Entry]]] = deque()
        self._rate = LoadRate()  # of a look-up

    @property
    def are_on(self) -> bool:
        """True if there is a store."""
        return self._tier is not None

    @property
    def has_ended(self) -> bool:
        return self._taken is not None or not self._ended.empty()

    @property
    def is_busy(self) -> bool:
        return self._num_in_flight > 0

    def awaits_answer(
        self, sequence_id: str, block_hashes: Sequence[bytes], cached: int, compute_s: float | None
    ) -> bool:
        """Returns whether the prompt of a sequence should wait for an answer. `cached` first blocks
        are in the pool; all others take `compute_s` to compute, None if that is not known."""
        tier = self._tier
        if tier is None or self._thread is None:
            return False
        lookup = self._asked.get(sequence_id)
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
        self._asked[sequence_id] = lookup
        self._num_in_flight += 1
        self._thread.submit(lookup)
        return True

    def turn(self, until: float) -> None:
        """Takes answers, as far as there is time until then by `time.perf_counter`, but at least a
        part of one."""
        while self.has_ended:
            if self._taken is None:
                self._open(self._ended.get_nowait())
            elif self._untaken:
                group, entries = self._untaken.popleft()
                group.learn(entries)
            else:
                self._taken.is_ended = True
                self._taken = None
                self._num_in_flight -= 1
            if time.perf_counter() >= until:
                return

    def _open(self, lookup: _Lookup) -> None:
        """Divides an answer into parts that take little time."""
        self._taken = lookup
        self._rate.observe(1, lookup.seconds)
        assert self._tier is not None
        links = list(pairwise((b"", *lookup.block_hashes)))
        if lookup.found:  # the worker that wrote them used them, at a priority that is not known
            written = [lookup.block_hashes[i] for i in lookup.found[0]]
            self._tier.policy.use(written, keep=False, priority=PRIORITY_MIN)
        for group, indexes in zip(self._tier.groups, lookup.found, strict=False):
            entries = [Entry(links[i][1], links[i][0]) for i in indexes]
            parts = (entries[i : i + _AT_ONCE] for i in range(0, len(entries), _AT_ONCE))
            self._untaken += ((group, part) for part in parts)

    def forget(self, sequence_id: str) -> None:
        """The sequence is gone."""
        self._asked.pop(sequence_id, None)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close(0.0)
