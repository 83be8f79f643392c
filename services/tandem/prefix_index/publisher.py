"""Publishes the blocks that one worker holds to the prefix tree.

An asyncio task publishes the blocks. The task is in one of two states:

    state     what the task does
    behind    It starts a new log (`reset`), because the tree may have no log of the worker. All
              held blocks must then be published again. The next state is `in step`.
    in step   It publishes the changes since the last batch every `interval_s`. Without changes, it
              sends an empty batch every `heartbeat_s`. Empty batches keep the worker's slot, and
              detect that the tree was lost.

If a batch is rejected, or Redis fails or misses a deadline, the state changes from `in step` to
`behind`. The delay between retries grows and is partly random.

`add` only changes dicts in memory, so a slow, stopped or empty Redis never delays the engine, and
no change is lost. If a block is stored and removed again before the next batch, neither change is
published. So at most one change waits for each block. In a batch, parents are stored before
children, and then children are removed before parents.

The epoch of a log is `PROCESS_EPOCH:COUNTER`. The counter grows with each new log. The worker's
record in Redis has the same epoch (`WorkerRecord.epoch`), which shows that the record and the log
belong together.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from tandem.common.backoff import Backoff, doubling_at_random
from tandem.common.process.cancellation import cancel
from tandem.common.process.ticks import until_tick_s
from tandem.errors import TandemError
from tandem.net.store.client import UNREACHABLE
from tandem.prefix_index.protocol import PrefixIndex

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    interval_s: float = 0.03  # pause between two batches if changes wait
    heartbeat_s: float = 1.0
    # Largest number of blocks in a batch. Redis runs one call at a time, so a larger batch would
    # delay look-ups for longer.
    batch_blocks: int = 256
    deadline_s: float = 2.0  # deadline of each Redis call
    backoff_min_s: float = 0.1
    backoff_max_s: float = 2.0
    # Number of entries of the tree that this publisher sweeps every `heartbeat_s`. Redis is busy
    # with a sweep for about 1 ms.
    sweep_entries: int = 2048
    # Interval of sweeps while the tree has nothing to sweep and this publisher publishes no change.
    # Each sweep also drops the workers that have published nothing for a minute.
    sweep_idle_s: float = 10.0


class Publisher:
    """Publishes one worker's stored and removed blocks to the prefix tree, on one event loop.

    The caller calls `start` first, then `add` for each report of the engine, and `aclose` last.
    """

    def __init__(
        self,
        index: PrefixIndex,
        worker_id: str,
        process_epoch: str,
        *,
        on_epoch: Callable[[str], None] = lambda epoch: None,
        config: PublisherConfig | None = None,
    ) -> None:
        """`on_epoch` is called with each new epoch, before the epoch's log begins."""
        self._index = index
        self._worker_id = worker_id
        self._process_epoch = process_epoch
        self._on_epoch = on_epoch
        self._config = config or PublisherConfig()
        # A random delay can be half as long as its nominal value. So the nominal delays begin at
        # twice `backoff_min_s`.
        self._backoff = Backoff(
            doubling_at_random(2 * self._config.backoff_min_s, self._config.backoff_max_s)
        )
        self.num_logs = 0  # number of logs that this publisher has started
        self._next_number = 0
        self._in_step = False
        # Ordered sets of block hashes, parents before children in `_held` and `_to_store`. `_held`
        # has the blocks that the worker holds. `_to_store` has the held blocks that were not
        # published yet. `_to_remove` has published blocks that the worker no longer holds.
        self._held: dict[bytes, None] = {}
        self._to_store: dict[bytes, None] = {}
        self._to_remove: dict[bytes, None] = {}
        self._num_in_flight = 0
        self.num_published = 0  # total number of changes that the tree accepted
        self._has_changed = False  # True: the last batch was not empty
        # times of the last and of the next sweep's begin, in seconds of `time.monotonic`
        self._began_at = 0.0
        self._sweep_at = 0.0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> str:
        return f"{self._process_epoch}:{self.num_logs}"

    @property
    def lag(self) -> int:
        """Number of stored and removed blocks that the tree does not know yet. In the state
        `behind`, this is the number of blocks that the worker holds.
        """
        if not self._in_step:
            return len(self._held)
        return len(self._to_store) + len(self._to_remove) + self._num_in_flight

    @property
    def in_step(self) -> bool:
        """True if the tree has applied the last batch and no change waits."""
        return self._in_step and not self.lag

    @property
    def num_held(self) -> int:
        return len(self._held)

    def start(self) -> None:
        assert self._task is None, "the publisher of KV blocks is already started"
        self._task = asyncio.create_task(self._run(), name=f"publish {self._worker_id}")
        self._task.add_done_callback(_log_failure)

    def add(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Adds the blocks that the engine has stored, and then those that it has removed, to the
        changes that the next batches publish.

        In `stored`, parents precede children. In `removed`, children precede parents.
        """
        for block_hash in stored:
            if block_hash in self._held:
                continue
            self._held[block_hash] = None
            if block_hash in self._to_remove:
                del self._to_remove[block_hash]
            else:
                self._to_store[block_hash] = None
        for block_hash in removed:
            if block_hash not in self._held:
                continue
            del self._held[block_hash]
            if block_hash in self._to_store:
                del self._to_store[block_hash]
            else:
                self._to_remove[block_hash] = None
        if self._to_store or self._to_remove:
            self._changed.set()

    async def aclose(self) -> None:
        """Stops publishing. Then drops the worker from the tree, if Redis answers in time.
        Otherwise a later sweep drops the worker."""
        if self._task is not None:
            await cancel(self._task)
            self._task = None
        try:
            async with asyncio.timeout(self._config.deadline_s):
                await self._index.forget(self._worker_id)
        except (*UNREACHABLE, TandemError) as error:
            logger.warning(
                "worker %s could not be removed from the prefix tree (%r); it is removed later",
                self._worker_id,
                error,
            )

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                if not self._in_step:
                    await self._begin_log()
                elif await self._publish_batch():
                    failures = 0
                    self._backoff.reset()
                    await self._sweep_when_due()
                else:
                    self._in_step = False
                    failures += 1
                    logger.warning(
                        "the prefix tree refused a batch of changes from this worker (epoch %s); "
                        "this worker now publishes all its KV blocks again",
                        self.epoch,
                    )
            except (*UNREACHABLE, TandemError) as error:
                # Redis may or may not have applied the call. So a new log is started.
                self._in_step = False
                failures += 1
                if failures == 1:
                    logger.warning(
                        "publishing to the prefix tree failed and is tried again: %r", error
                    )
            except Exception:
                # The cause is a bug. Starting a new log is better than ending the publisher's task.
                self._in_step = False
                failures += 1
                logger.exception("publishing KV blocks to the prefix tree failed; trying again")
            await self._pause(failures)

    async def _begin_log(self) -> None:
        self.num_logs += 1
        self._on_epoch(self.epoch)
        async with asyncio.timeout(self._config.deadline_s):
            await self._index.reset(self._worker_id, self.epoch)
        self._next_number = 0
        self._to_store = dict(self._held)
        self._to_remove = {}
        self._num_in_flight = 0
        self._in_step = True
        logger.info(
            "publishing %d KV blocks to the prefix tree as worker epoch %s",
            len(self._held),
            self.epoch,
        )

    async def _publish_batch(self) -> bool:
        """Publishes one batch, which is empty if no change waits. Returns whether the tree applied
        the batch.

        If more changes wait than fit into a batch, stored blocks are taken first.
        """
        # `_take` removes the batch's blocks from `_to_store` and `_to_remove`. So if a block of the
        # batch is removed or stored again during the Redis call, `add` records a new change.
        stored = _take(self._to_store, self._config.batch_blocks)
        removed = _take(self._to_remove, self._config.batch_blocks - len(stored))
        self._num_in_flight = len(stored) + len(removed)
        async with asyncio.timeout(self._config.deadline_s):
            applied = await self._index.publish(
                self._worker_id,
                self.epoch,
                self._next_number,
                stored,
                removed,
                complete=not self._to_store and not self._to_remove,
            )
        if applied:
            self._next_number += 1
            self._has_changed = self._num_in_flight > 0
            self.num_published += self._num_in_flight
            self._num_in_flight = 0
        return applied

    async def _sweep_when_due(self) -> None:
        config = self._config
        now = time.monotonic()
        if self._has_changed:
            self._sweep_at = min(self._sweep_at, self._began_at + config.heartbeat_s)
        if now >= self._sweep_at:
            self._began_at = now
            self._sweep_at = now + config.heartbeat_s  # also of the next try after a failure
            async with asyncio.timeout(config.deadline_s):
                is_left = await self._index.sweep(config.sweep_entries)
            self._sweep_at = now + (config.heartbeat_s if is_left else config.sweep_idle_s)

    async def _pause(self, failures: int) -> None:
        config = self._config
        if failures and not self._in_step:
            await asyncio.sleep(self._backoff.next_s())
        elif self.lag >= config.batch_blocks:
            await asyncio.sleep(0)
        else:
            if self._has_changed:
                await asyncio.sleep(config.interval_s)
            self._changed.clear()
            if not self.lag:
                with suppress(TimeoutError):
                    async with asyncio.timeout(until_tick_s(config.heartbeat_s)):
                        await self._changed.wait()


def _take(waiting: dict[bytes, None], count: int) -> list[bytes]:
    """Removes and returns the first `count` keys of `waiting`."""
    taken = list(islice(waiting, count))
    for block_hash in taken:
        del waiting[block_hash]
    return taken


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error(
            "publishing to the prefix tree has ended because of an error; restart this worker to "
            "publish again",
            exc_info=error,
        )
