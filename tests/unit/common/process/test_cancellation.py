"""The end of tasks that are cancelled."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tandem.common.process import cancellation
from tandem.common.process.cancellation import cancel


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "_AGAIN_S", 0.01)


async def _ignores_the_first_cancellation() -> None:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)


async def test_a_task_that_goes_on_is_cancelled_again(caplog: pytest.LogCaptureFixture) -> None:
    """A library may take a cancellation for an error of its own."""
    tasks = [
        asyncio.create_task(asyncio.sleep(3600), name="obeys"),
        asyncio.create_task(_ignores_the_first_cancellation(), name="deaf"),
        asyncio.create_task(asyncio.sleep(0), name="is over"),
    ]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        await cancel(*tasks)
    assert all(task.done() for task in tasks)
    assert [r.getMessage() for r in caplog.records] == [
        "the task deaf still runs 0.01 s after its cancellation; it is cancelled again"
    ]


async def test_a_cancellation_that_a_result_hides_comes_again() -> None:
    """It comes just when the call under a deadline has ended: Python 3.11 returns the result."""
    answered = asyncio.get_running_loop().create_future()
    num_answers = 0

    async def loop_of_calls() -> None:
        nonlocal num_answers
        while True:
            await asyncio.wait_for(asyncio.shield(answered), 3600)
            num_answers += 1
            await asyncio.sleep(3600)

    calls = asyncio.create_task(loop_of_calls(), name="calls")
    await asyncio.sleep(0.01)
    answered.set_result(None)
    await asyncio.sleep(0)  # the shield has the result, and who waits for it does not know yet
    async with asyncio.timeout(10):
        await cancel(calls)
    assert calls.cancelled()
    assert num_answers == (1 if sys.version_info < (3, 12) else 0)
