"""A worker's way to the other pool: what it waits for, and in which order it is told."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from services.worker.decode_service import DecodeService
from services.worker.role import RoleChange


class Asker:
    """A sequence that follows a lease for so long, unless it is given up."""

    def __init__(self, lease_s: float) -> None:
        self.may_ask = True
        self.asks: asyncio.Timeout | None = None
        self.gave_up = False
        self.task = asyncio.create_task(self._run(lease_s))

    async def _run(self, lease_s: float) -> None:
        try:
            async with asyncio.timeout(None) as self.asks:
                await asyncio.sleep(lease_s)
        except TimeoutError:
            self.gave_up = True
        finally:
            self.asks = None


def service_of(*askers: Any) -> DecodeService:
    service = DecodeService.__new__(DecodeService)
    service._sequences = dict(enumerate(askers))  # type: ignore[arg-type]
    return service


async def test_leases_have_a_grace_then_they_are_given_up() -> None:
    quick, slow = Asker(0.05), Asker(60)
    decodes = SimpleNamespace(may_ask=True, asks=None)
    await asyncio.sleep(0)
    started = time.monotonic()
    await service_of(quick, slow, decodes).ask_nobody(0.2)

    assert time.monotonic() - started < 2
    assert (quick.gave_up, slow.gave_up) == (False, True)
    assert not any(s.may_ask for s in (quick, slow, decodes))


async def test_it_is_told_when_nothing_waits_any_more_and_prompts_are_taken() -> None:
    told: list[str] = []

    async def ask_nobody(grace_s: float) -> None:
        await asyncio.sleep(0.01)
        told.append("asks nobody")

    decode: Any = SimpleNamespace(
        leave_pool=lambda: told.append("leaves"),
        join_pool=lambda: told.append("joins"),
        ask_nobody=ask_nobody,
    )
    prefill: Any = SimpleNamespace(takes_prompts=True)

    async def tell() -> None:
        told.append(f"{change.role}, takes prompts: {prefill.takes_prompts}")

    change = RoleChange("decode", decode, prefill, tell)
    assert await change.to("decode") == 0.0
    assert told == []
    await asyncio.gather(change.to("prefill"), change.to("prefill"))
    assert told == ["leaves", "asks nobody", "prefill, takes prompts: True"]
    told.clear()
    assert await change.to("decode") > 0
    assert told == ["joins", "decode, takes prompts: False"]
