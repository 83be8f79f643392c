"""A journal is read though other versions write to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tandem.net.store.cluster_event import ClusterEvent
from tandem.net.store.journal import Journal

pytestmark = pytest.mark.asyncio


async def test_entries_that_cannot_be_read_are_left_out() -> None:
    event = ClusterEvent(1.0, "started", "decode-0", "a text")
    texts = [b'{"at": "noon"}', msgspec.json.encode(event), b"\xff"]

    async def xrevrange(key: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return [*((b"1-1", {b"entry": text}) for text in texts), (b"1-0", {b"other": b""})]

    redis: Any = SimpleNamespace(xrevrange=xrevrange)
    journal = Journal(redis, "p", ("all",), "the log of events")
    found = await journal.read("all", 10, lambda text: msgspec.json.decode(text, type=ClusterEvent))
    assert found == [event]
