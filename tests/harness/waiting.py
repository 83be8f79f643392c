"""Waits for what other tasks, threads and processes do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def eventually(condition: Callable[[], bool], *, deadline_s: float = 10.0) -> None:
    """Polls until `condition` is true. Raises TimeoutError."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], Any], deadline_s: float = 120.0, what: str = "it") -> Any:
    """Polls outside an event loop until `condition` is true, and returns its value."""
    give_up_at = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < give_up_at, f"{what} did not come about in {deadline_s:g} s"
        time.sleep(0.05)
    return found
