"""The end of a router's tasks."""

from __future__ import annotations

import asyncio

import pytest

from tandem.router import server


async def _ignores_the_first_cancellation() -> None:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)


async def test_a_task_that_goes_on_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library may take a cancellation for an error of its own."""
    monkeypatch.setattr(server, "_CANCEL_AGAIN_S", 0.01)
    tasks = [
        asyncio.create_task(asyncio.sleep(3600), name="obeys"),
        asyncio.create_task(_ignores_the_first_cancellation(), name="deaf"),
        asyncio.create_task(asyncio.sleep(0), name="is over"),
    ]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        await server._cancel(tasks)
    assert all(task.done() for task in tasks)
    assert [r.getMessage() for r in caplog.records] == [
        "deaf goes on after its cancellation; once more"
    ]
