"""The LoRA adapters in an engine's memory. An adapter is read when a sequence needs it. The number
of adapters is limited by the number of slots.

    absent --needed, and a slot is free or idle--> loading --settle--> loaded
      ^ ^                                             `--read error--> failed, for FAILED_S seconds
      | '------ least recently used, and its slot is needed -----'

A slot is in use while an admitted sequence needs the adapter in it; otherwise it is idle. Only
adapters in idle slots are evicted. A thread reads the files of an adapter during the engine's
steps, and `settle` installs the adapter between two steps. If reading hangs, the process ends.
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

READ_DEADLINE_S = 120.0  # a process whose read of an adapter takes longer ends itself
FAILED_S = 30.0  # for this time, an adapter that could not be read is refused without another try


class AdapterRunner(Protocol):
    """Reads adapters and keeps them for the steps. Only `load_adapter` may run during a step."""

    def load_adapter(self, adapter: Adapter) -> Any: ...

    def add_adapter(self, loaded: Any) -> None: ...

    def drop_adapter(self, digest: str) -> None: ...


class AdapterSlotState(Enum):
    LOADED = "loaded"
    LOADING = "loading"  # the adapter's files are being read
    NO_SLOT = "no_slot"  # all slots are in use


class AdapterSlots:
    """The slots for an engine's adapters. With `num_slots` 0, every adapter is refused."""

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
        # Digests, the most recently used last.
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._reading: dict[str, tuple[Adapter, Future[Any]]] = {}
        self._failed: dict[str, tuple[float, AdapterUnavailable]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    @property
    def loaded(self) -> list[str]:
        """Digests of the adapters in memory."""
        return list(self._loaded)

    @property
    def failed(self) -> list[str]:
        """Digests of adapters whose last read failed less than FAILED_S ago."""
        self._forget_failed()
        return list(self._failed)

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    @property
    def has_results(self) -> bool:
        """True if `settle` has an adapter to install or an error to return."""
        return any(future.done() for _, future in self._reading.values())

    def check(self, adapter: Adapter | None) -> None:
        """Raises AdapterUnavailable if the adapter cannot be loaded on this worker."""
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

    def request(self, adapter: Adapter, in_use: Callable[[], Collection[str]]) -> AdapterSlotState:
        """Returns the state of an adapter, and starts to read it if a slot is free or idle.

        `in_use` returns the digests of the adapters that must not be evicted.
        """
        digest = adapter.digest
        if digest in self._loaded:
            self._loaded.move_to_end(digest)
            return AdapterSlotState.LOADED
        if digest in self._reading:
            return AdapterSlotState.LOADING
        if len(self._loaded) + len(self._reading) >= self._num_slots and not self._evict(in_use()):
            return AdapterSlotState.NO_SLOT
        self._reading[digest] = adapter, self._thread.submit(self._read, adapter)
        return AdapterSlotState.LOADING

    def _read(self, adapter: Adapter) -> Any:
        with hang_limit(READ_DEADLINE_S):
            return self._runner.load_adapter(adapter)

    def settle(self) -> dict[str, AdapterUnavailable]:
        """Installs the adapters that were read. Returns the errors of adapters that could not be
        read, by digest."""
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
                # The client gets the error without a path of this machine.
                why = why.replace(str(Path(adapter.path).expanduser()), "its folder")
                failed = AdapterUnavailable(f"the adapter {adapter.name!r} cannot be loaded: {why}")
                self._failed[digest] = self._clock() + FAILED_S, failed
                errors[digest] = failed
        return errors

    def _evict(self, in_use: Collection[str]) -> bool:
        """Evicts the least recently used idle adapter. Returns False if all are in use."""
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
