"""A drain says what it waits for, and ends at its deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.worker.decode.sequence import SequenceState
from tandem.worker.lifecycle import drain as drain_module
from tandem.worker.lifecycle.drain import describe, drain
from tandem.worker.prefill.leases import Lease


class Held:
    """Both services of a worker, with what the test puts there."""

    def __init__(self) -> None:
        self.sequences: list[Any] = []
        self.leases: list[Lease] = []

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    @property
    def num_leases(self) -> int:
        return len(self.leases)


def sequence(state: SequenceState, submitted_at: float) -> Any:
    return SimpleNamespace(state=state, submitted_at=submitted_at)


def test_what_is_waited_for_is_told_by_consumer_and_stage() -> None:
    held: Any = Held()
    held.sequences = [sequence(SequenceState.RUNNING, 90.0)] * 2
    held.leases = [
        Lease("a", "decode-0", opened_at=99.0),
        Lease("b", "decode-0", opened_at=80.5, admitted_at=81.0),
        Lease("c", "decode-1", opened_at=95.0, admitted_at=96.0, is_ahead=True),
        Lease("d", "prefill-1", opened_at=95.0, is_hold=True, is_ahead=True),
    ]
    assert describe(held, held, 100.0) == (
        "cache leases of prefill-1 read by its consumer: 1, leases of decode-0 computed: 1, "
        "leases of decode-0 queued: 1, leases of decode-1 read by its consumer: 1, "
        "sequences running: 2; the oldest is 19.5 s old"
    )


async def test_a_drain_that_goes_on_says_why_and_ends_at_its_deadline(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "_TELL_S", 0.1)
    caplog.set_level(logging.INFO)
    held: Any = Held()
    held.leases = [Lease("a", "decode-0")]
    deadline = time.monotonic() + 600
    draining = asyncio.create_task(drain(held, held, lambda: deadline))
    async with asyncio.timeout(10):
        while "waits for leases of decode-0 queued: 1" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        deadline = time.monotonic()  # another request to stop
        await draining
    assert "so 0 sequences and 1 leases are aborted (leases of decode-0" in caplog.text


async def test_a_drain_ends_when_nothing_is_held(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    held: Any = Held()
    held.sequences = [sequence(SequenceState.RUNNING, time.monotonic())]
    draining = asyncio.create_task(drain(held, held, lambda: time.monotonic() + 600))
    await asyncio.sleep(0)
    held.sequences.clear()
    async with asyncio.timeout(10):
        await draining
    assert "no sequence and no lease is left" in caplog.text
