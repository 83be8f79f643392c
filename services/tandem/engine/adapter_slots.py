"""Keeps LoRA adapters in the memory of an engine, at most `num_slots` at a time. An adapter is read
from its files when a sequence first needs it.

The states of an adapter, and the event that moves it from one state to the next:

    absent     --a sequence needs the adapter, and there is room--> loading
    loading    --`settle`, after the files were read-->             loaded
    loading    --`settle`, after a read error-->                    failed
    loaded     --evicted-->                                         absent
    failed     --FAILED_S seconds are over-->                       absent

There is room if fewer than `num_slots` adapters are loading or loaded, or if a loaded adapter can
be evicted. The least recently used adapter that no admitted sequence needs is evicted.

A thread reads the files during the engine's steps, and `settle` installs the adapter between two
steps. If a read takes longer than READ_DEADLINE_S, the process ends.
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

READ_DEADLINE_S = 120.0  # the process ends if reading an adapter takes longer than this
FAILED_S = 30.0  # for this time after a failed read, sequences with the adapter are refused


class AdapterRunner(Protocol):
    """The methods of a model runner that read, add and remove LoRA adapters. Only `load_adapter`
    may be called during a step."""

    def load_adapter(self, adapter: Adapter) -> Any: ...

    def add_adapter(self, loaded: Any) -> None: ...

    def drop_adapter(self, digest: str) -> None: ...


class AdapterSlotState(Enum):
    LOADED = "loaded"
    LOADING = "loading"  # the adapter's files are being read
    NO_SLOT = "no_slot"  # admitted sequences need the adapters in all slots


class AdapterSlots:
    """The LoRA adapters that are in an engine's memory or are being read."""

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
        # Digests of the loaded adapters. The most recently used one is last.
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
        """Digests of adapters whose last read failed less than FAILED_S seconds ago."""
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
            raise AdapterUnavailable(
                "this worker serves no adapters: its --max-loras is 0; start it with "
                "--max-loras of at least 1"
            )
        if adapter.rank > self._rank_max:
            raise AdapterUnavailable(
                f"the adapter {adapter.name!r} has rank {adapter.rank}; this worker allows at "
                f"most {self._rank_max} (--max-lora-rank)"
            )
        self._forget_failed()
        if (failed := self._failed.get(adapter.digest)) is not None:
            raise failed[1]

    def request(self, adapter: Adapter, in_use: Callable[[], Collection[str]]) -> AdapterSlotState:
        """Returns the state of an adapter. If it is neither loaded nor being read, starts to read
        its files. If all slots are taken, evicts another adapter first.

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
        """Installs the adapters whose files were read. Returns the errors of the adapters that
        could not be loaded, by the adapter's digest."""
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
                    "the adapter %s in %s cannot be loaded: %s", adapter.name, adapter.path, why
                )
                # The error is sent to the client, which must not learn paths of this machine.
                why = why.replace(str(Path(adapter.path).expanduser()), "its folder")
                failed = AdapterUnavailable(f"the adapter {adapter.name!r} cannot be loaded: {why}")
                self._failed[digest] = self._clock() + FAILED_S, failed
                errors[digest] = failed
        return errors

    def _evict(self, in_use: Collection[str]) -> bool:
        """Evicts the least recently used adapter that is not in use. Returns False if all loaded
        adapters are in use."""
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
