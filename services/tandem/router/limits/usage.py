"""Counts the tenants' usage by minute and by day, and writes it to Redis in batches.

    event                   effect
    a request ends          its counts are added to the pending rows of its tenant
    a second has passed     the pending rows become a batch with a number, which is sent to Redis
    Redis confirms a batch  the batch is dropped
    Redis does not answer   the same batch is sent again with the same number
Redis accepts each number only once, so a batch whose confirmation was lost is not counted twice.
While Redis is away, rows are kept in memory. There are few rows: one for each tenant and day, and
one for each tenant and minute of the last hours.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tandem.errors import BadRequest, Forbidden, UsageUnknown
from tandem.net.security.keys import KeyRecord
from tandem.net.store.client import UNREACHABLE
from tandem.router.limits.metrics import OTHER, TenantMetrics
from tandem.router.limits.usage_store import COLUMNS, WINDOWS, Row, UsageRow, UsageStore, Window

log = logging.getLogger(__name__)

FLUSH_S = 1.0
# Largest number of pending rows. Tenants that would need further rows are counted as "other".
ROWS_MAX = 20_000


class UsageQuery(NamedTuple):
    """A checked query for the usage in the last `num_windows` minutes or days."""

    window: Window
    num_windows: int
    tenant: str | None  # None: all tenants

    @classmethod
    def of(
        cls, window: str, num_windows: int, tenant: str | None, key: KeyRecord | None
    ) -> "UsageQuery":
        """Returns a checked query. A key with the role `user` may read only its own tenant's usage.

        Raises BadRequest for a wrong value, and Forbidden for a tenant that is not the key's.
        """
        kind = next((known for known in WINDOWS if known == window), None)
        if kind is None:
            raise BadRequest(f"window must be {' or '.join(WINDOWS)}", param="window")
        most = WINDOWS[kind].kept_s // WINDOWS[kind].seconds
        if not 1 <= num_windows <= most:
            raise BadRequest(
                f"last is {num_windows}; with window={window} it must be from 1 to {most}, because "
                "older usage is not kept",
                param="last",
            )
        if key is not None and key.role == "user":
            if tenant not in (None, key.tenant):
                raise Forbidden(
                    "the usage of another tenant is shown only to API keys of operators"
                )
            tenant = key.tenant
        return cls(kind, num_windows, tenant)


class UsageMeter:
    """Counts the tenants' usage on one router. `run` writes the counts to Redis."""

    def __init__(self, store: UsageStore, metrics: TenantMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._pending: dict[Row, list[int]] = {}
        self._batch: Mapping[Row, Sequence[int]] = {}
        self._number = 1  # number of the unconfirmed batch, or of the next batch if there is none
        self._flushing = asyncio.Lock()
        self._is_away = False
        self._has_rows = asyncio.Event()  # set if a row may be unwritten

    def add(self, tenant: str, *, prompt: int, cached: int, completion: int) -> None:
        """Counts one served request."""
        self._metrics.served(tenant, prompt, cached, completion)
        now = time.time()
        for name, window in WINDOWS.items():
            row = Row(name, int(now // window.seconds) * window.seconds, tenant)
            if row not in self._pending and len(self._pending) >= ROWS_MAX:
                row = row._replace(tenant=OTHER)
            counts = self._pending.setdefault(row, [0] * len(COLUMNS))
            for column, count in enumerate((1, prompt, cached, completion)):
                counts[column] += count
        self._has_rows.set()

    async def run(self) -> None:
        """Flushes each second while rows are unwritten, and once more when it is cancelled."""
        try:
            while True:
                await self._has_rows.wait()
                await asyncio.sleep(FLUSH_S)
                self._has_rows.clear()
                if not await self.flush():
                    self._has_rows.set()
        finally:
            await self.flush()

    async def flush(self) -> bool:
        """Writes all pending rows to Redis; returns whether that succeeded."""
        async with self._flushing:
            while self._batch or self._pending:
                if not self._batch:
                    self._batch = self._pending
                    self._pending = {}
                try:
                    await self._store.add(self._number, self._batch)
                except UNREACHABLE as error:
                    if not self._is_away:
                        log.warning(
                            "Redis does not answer (%r), so this router keeps the usage counts "
                            "and writes them later",
                            error,
                        )
                    self._is_away = True
                    self._drop_old_minutes()
                    return False
                self._batch = {}
                self._number += 1
                self._is_away = False
        return True

    async def read(self, query: UsageQuery, *, now: float) -> list[UsageRow]:
        """Returns the usage rows that match the query up to `now`, oldest first.

        Raises UsageUnknown if Redis does not answer.
        """
        try:
            await self.flush()
            return await self._store.read(query.window, query.num_windows, query.tenant, now=now)
        except UNREACHABLE as error:
            raise UsageUnknown(
                f"usage is in Redis, which does not answer: {error!r}; try again",
                retry_after_s=FLUSH_S,
            ) from error

    def _drop_old_minutes(self) -> None:
        """Drops pending rows of minutes that are too old to be kept in Redis."""
        kept_from = time.time() - WINDOWS["minute"].kept_s
        for row in [r for r in self._pending if r.window == "minute" and r.start < kept_from]:
            del self._pending[row]
