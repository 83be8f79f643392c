"""The LoRA adapters in an engine's memory: a bounded number, read when a sequence wants one.

    absent --wanted, and a slot is free or idle--> loading --settle--> loaded
      ^ ^                                             `--> failed, for a while
      | '------ idle the longest, and its slot is wanted --------'

A slot is in use while a sequence that was admitted wants its adapter, and is never taken then. The
files are read in a thread, beside the steps; `settle`, between two steps, hands over what is read.
If reading hangs, the process ends.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from tandem.common.adapter import Adapter
from tandem.common.process.hang_limit import hang_limit
from tandem.errors import AdapterUnavailable, TandemError

log = logging.getLogger(__name__)

READ_DEADLINE_S = 120.0  # a process that reads an adapter for longer ends itself
FAILED_S = 30.0  # so long an adapter that could not be read is refused without another try


class AdapterRunner(Protocol):
    """Reads and keeps adapters for steps. Only `load_adapter` may run beside a step."""

    def load_adapter(self, adapter: Adapter) -> Any: ...

    def add_adapter(self, loaded: Any) -> None: ...

    def drop_adapter(self, digest: str) -> None: ...


class Answer(Enum):
    LOADED = "loaded"
    AWAITED = "awaited"  # it is being read
    FULL = "full"  # all slots are in use


class AdapterSlots:
    """The places in memory for an engine's adapters. With `num_slots` 0 all are refused."""

    def __init__(
        self,
        runner: AdapterRunner,
        *,
        num_slots: int,
        rank_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._num_slots = num_slots
        self._rank_max = rank_max
        self._clock = clock
        self._loaded: OrderedDict[str, None] = OrderedDict()  # digests, the last used last
        self._reading: dict[str, tuple[Adapter, Future[Any]]] = {}
        self._failed: dict[str, tuple[float, AdapterUnavailable]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    @property
    def loaded(self) -> list[str]:
        """Digests of the adapters in memory."""
        return list(self._loaded)

    @property
    def failed(self) -> list[str]:
        """Digests of those that could not be read of late."""
        self._forget_failed()
        return list(self._failed)

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    @property
    def has_news(self) -> bool:
        """True if `settle` would do something."""
        return any(future.done() for _, future in self._reading.values())

    def check(self, adapter: Adapter | None) -> None:
        """Raises AdapterUnavailable for one that can have no slot here."""
        if adapter is None:
            return
        if not self._num_slots:
            raise AdapterUnavailable("this worker has no adapters: its max-loras is 0")
        if adapter.rank > self._rank_max:
            raise AdapterUnavailable(
                f"the adapter {adapter.name!r} has rank {adapter.rank}; max-lora-rank of this "
                f"worker is {self._rank_max}"
            )
        self._forget_failed()
        if (failed := self._failed.get(adapter.digest)) is not None:
            raise failed[1]

    def want(self, adapter: Adapter, in_use: Callable[[], Collection[str]]) -> Answer:
        """Says whether an adapter is loaded, and has it read if there is a slot. `in_use` returns
        the digests whose slots may not be taken."""
        digest = adapter.digest
        if digest in self._loaded:
            self._loaded.move_to_end(digest)
            return Answer.LOADED
        if digest in self._reading:
            return Answer.AWAITED
        if len(self._loaded) + len(self._reading) >= self._num_slots and not self._evict(in_use()):
            return Answer.FULL
        self._reading[digest] = adapter, self._thread.submit(self._read, adapter)
        return Answer.AWAITED

    def _read(self, adapter: Adapter) -> Any:
        with hang_limit(READ_DEADLINE_S):
            return self._runner.load_adapter(adapter)

    def settle(self) -> dict[str, AdapterUnavailable]:
        """Takes in what was read; returns the errors of those that cannot be, by digest."""
        errors = {}
        for digest, (adapter, future) in list(self._reading.items()):
            if not future.done():
                continue
            del self._reading[digest]
            try:
                self._runner.add_adapter(future.result())
                self._loaded[digest] = None
            except (TandemError, OSError, MemoryError) as error:
                why = error.message if isinstance(error, TandemError) else repr(error)
                log.warning(
                    "the adapter %s of %s cannot be loaded: %s", adapter.name, adapter.path, why
                )
                # A client gets the error, and no path of this machine.
                why = why.replace(str(Path(adapter.path).expanduser()), "its folder")
                failed = AdapterUnavailable(f"the adapter {adapter.name!r} cannot be loaded: {why}")
                self._failed[digest] = self._clock() + FAILED_S, failed
                errors[digest] = failed
        return errors

    def _evict(self, in_use: Collection[str]) -> bool:
        """Frees the slot that is idle the longest; returns whether there was one."""
        idle = next((digest for digest in self._loaded if digest not in in_use), None)
        if idle is None:
            return False
        del self._loaded[idle]
        self._runner.drop_adapter(idle)
        return True

    def _forget_failed(self) -> None:
        now = self._clock()
        for digest in [d for d, (until, _) in self._failed.items() if until <= now]:
            del self._failed[digest]
