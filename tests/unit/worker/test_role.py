"""A worker's way to the other pool: what it waits for, and in which order it is told."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from tandem.worker.decode.service import DecodeService
from tandem.worker.lifecycle.role import RoleChange


class Asker:
    """A sequence that follows a lease for so long, unless it is given up."""

    def __init__(self, lease_s: float) -> None:
        self.may_prefill_remotely = True
        self.remote_prefill: asyncio.Timeout | None = None
        self.gave_up = False
        self.task = asyncio.create_task(self._run(lease_s))

    async def _run(self, lease_s: float) -> None:
        try:
            async with asyncio.timeout(None) as self.remote_prefill:
                await asyncio.sleep(lease_s)
        except TimeoutError:
            self.gave_up = True
        finally:
            self.remote_prefill = None


def service_of(*askers: Any) -> DecodeService:
    service = DecodeService.__new__(DecodeService)
    service._sequences = list(askers)  # type: ignore[assignment]
    return service


async def test_leases_have_a_grace_then_they_are_given_up() -> None:
    quick = Asker(0.05)
    slow = Asker(60)
    decodes = SimpleNamespace(may_prefill_remotely=True, remote_prefill=None)
    await asyncio.sleep(0)
    started = time.monotonic()
    await service_of(quick, slow, decodes).stop_remote_prefills(0.2)

    assert time.monotonic() - started < 2
    assert (quick.gave_up, slow.gave_up) == (False, True)
    assert not any(s.may_prefill_remotely for s in (quick, slow, decodes))


class Recorded:
    """A worker whose parts only say what they were told, and take a moment to ask nobody."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.prefill: Any = SimpleNamespace(takes_prompts=True)
        decode: Any = SimpleNamespace(
            leave_pool=lambda: self.told.append("leaves"),
            join_pool=lambda: self.told.append("joins"),
            stop_remote_prefills=self._stop_remote_prefills,
        )
        self.change = RoleChange("decode", decode, self.prefill, self._tell)

    async def _stop_remote_prefills(self, grace_s: float) -> None:
        await asyncio.sleep(0.01)
        self.told.append("asks nobody")

    async def _tell(self) -> None:
        self.told.append(f"{self.change.role}, takes prompts: {self.prefill.takes_prompts}")


async def test_it_is_told_when_nothing_waits_any_more_and_prompts_are_taken() -> None:
    worker = Recorded()
    assert await worker.change.to("decode") == 0.0
    assert worker.told == []
    await asyncio.gather(worker.change.to("prefill"), worker.change.to("prefill"))
    assert worker.told == ["leaves", "asks nobody", "prefill, takes prompts: True"]
    worker.told.clear()
    assert await worker.change.to("decode") > 0
    assert worker.told == ["joins", "decode, takes prompts: False"]


async def test_a_loan_ends_with_a_change_back_or_with_the_worker() -> None:
    worker = Recorded()
    assert worker.change.loan == ""
    await worker.change.to("prefill")
    assert worker.change.loan == "prefill"
    await worker.change.to("decode")
    assert worker.change.loan == ""
    await worker.change.to("prefill")
    worker.change.end_loan()
    assert (worker.change.loan, worker.change.role) == ("", "prefill")


async def test_a_change_goes_on_when_nobody_waits_for_it() -> None:
    """A router's call past its deadline is such a case: the worker was stopped for a while."""
    worker = Recorded()
    asked = asyncio.create_task(worker.change.to("prefill"))
    await asyncio.wait([asked], timeout=0.001)
    assert worker.told == ["leaves"]
    asked.cancel()
    assert await worker.change.to("prefill") == 0.0
    assert worker.told == ["leaves", "asks nobody", "prefill, takes prompts: True"]
