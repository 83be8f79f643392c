"""Moves a worker to the other pool and back, without a restart. The worker keeps its model and
cache.

    decode  --> out of placement --> no sequence waits for a prefill worker --> prefill
    prefill --> accepts no more prompts ------------------------------------> decode

Running sequences continue on this worker, or routers migrate them. Open leases end as usual.

Workers never wait for each other in a circle, even if their roles change. docs/transfer.md explains
why (section "No cycle of waits").

A worker is lent while it is in another pool than the one of its configured role. If a lent worker
crashes, its next process starts in the pool to which the worker was lent. The loan ends when the
worker moves back, or when it shuts down without a crash.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tandem.common.config.cluster import Role
from tandem.worker.decode.service import DecodeService
from tandem.worker.prefill.service import PrefillService

log = logging.getLogger(__name__)

# Unfinished remote prefills get this many seconds to finish. After that, this worker computes the
# missing tokens itself.
_GRACE_S = 0.5


class RoleChange:
    """Changes the role of a worker. `role` is the pool that the worker is in."""

    def __init__(
        self,
        role: Role,
        decode: DecodeService,
        prefill: PrefillService,
        tell: Callable[[], Awaitable[None]],
    ) -> None:
        """`tell` writes the worker's record in Redis, so that other processes see the new role."""
        self.role: Role = role
        self._own = role
        self._ends_in_order = False
        self._decode = decode
        self._prefill = prefill
        self._tell = tell
        self._one_at_a_time = asyncio.Lock()
        self._changes: set[asyncio.Task[float]] = set()

    @property
    def loan(self) -> str:
        """The role in which the next process of this worker starts; "": the configured role."""
        return "" if self.role == self._own or self._ends_in_order else self.role

    def end_loan(self) -> None:
        """Makes the next process of this worker start in the configured role. The worker calls this
        when it shuts down without a crash.
        """
        self._ends_in_order = True

    async def to(self, role: Role) -> float:
        """Moves this worker to a pool; returns when that is done, with the duration in seconds.

        The change finishes even if the caller stops waiting; otherwise the worker could be in no
        pool.
        """
        change = asyncio.create_task(self._change(role))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return await asyncio.shield(change)

    async def _change(self, role: Role) -> float:
        started = time.monotonic()
        async with self._one_at_a_time:
            if role == self.role:
                return 0.0
            if role == "prefill":
                self._decode.leave_pool()
                await self._decode.stop_remote_prefills(_GRACE_S)
                self._prefill.takes_prompts = True
            else:
                self._prefill.takes_prompts = False
                self._decode.join_pool()
            self.role = role
            await self._tell()
        took_s = time.monotonic() - started
        log.info("this worker moved to the %s pool in %.3f s", role, took_s)
        return took_s
