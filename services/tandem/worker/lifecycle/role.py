"""A worker moves to the other pool and back: no restart, its model and its cache as they are.

    decode  --> out of placement --> no prompt here waits for a prefill worker --> prefill
    prefill --> takes no more prompts -------------------------------------------> decode

What decodes here goes on, or routers move it; leases that are open here end as they would. Why that
is enough is the argument of docs/transfer.md: who waits for a prefill worker, and holds blocks
while it waits, is in the decode pool, and whom it waits for was in the prefill pool when it asked.
So if waits made a circle, each of its workers would have joined the decode pool later than the one
before it in the circle, and so later than itself.

A worker in the other pool is lent. The loan survives a crash of the process, and ends with a change
back or when the worker ends in order.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tandem.common.config.cluster import Role
from tandem.worker.decode.service import DecodeService
from tandem.worker.prefill.service import PrefillService

log = logging.getLogger(__name__)

# For prefill workers that are asked already; then what is missing is computed here.
_GRACE_S = 0.5


class RoleChange:
    """Changes the role of a worker. `role` is the pool that the worker is in now."""

    def __init__(
        self,
        role: Role,
        decode: DecodeService,
        prefill: PrefillService,
        tell: Callable[[], Awaitable[None]],
    ) -> None:
        """`tell` lets others know: it writes the record."""
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
        """Returns the role in which the next process of this worker is to start; empty: its
        own."""
        return "" if self.role == self._own or self._ends_in_order else self.role

    def end_loan(self) -> None:
        """The worker ends in order: whoever gets its name next starts in the pool of its own."""
        self._ends_in_order = True

    async def to(self, role: Role) -> float:
        """Returns when this worker does the other pool's work, and how long that took, seconds.

        Who asked may stop waiting; the change goes on: half of it is a worker in no pool.
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
                await self._decode.ask_nobody(_GRACE_S)
                self._prefill.takes_prompts = True
            else:
                self._prefill.takes_prompts = False
                self._decode.join_pool()
            self.role = role
            await self._tell()
        took_s = time.monotonic() - started
        log.info("this worker is in the %s pool now, after %.3f s", role, took_s)
        return took_s
