"""The books of slices of the chaos run: what is added up, and the line through the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.slices import memory_lines, read, sums, write


def slice_of(number: int, memory_mib: dict[str, float], **more: Any) -> dict[str, Any]:
    return {
        "number": number,
        "requests": 5000,
        "tokens": 9,
        "seconds": 100.0,
        "seconds_in_all": 120.0,
        "slowest_s": 1.0,
        "problems": [],
        "retries": {},
        "outcomes": {"finished": 4000, "left": 1000},
        "faults": {"kill": 2},
        "memory_mib": {"start": {}, "end": memory_mib},
        **more,
    }


def test_slices_are_added_up_and_go_on_where_they_ended(tmp_path: Path) -> None:
    path = tmp_path / "books.json"
    assert read(path) == []
    books = [
        slice_of(0, {}, retries={"finished": 3}, slowest_s=7.0),
        slice_of(1, {}, faults={"kill": 1, "kill router": 1}, problems=["a", "b"]),
    ]
    write(path, books)
    found = sums(read(path))
    assert found["requests"] == 10_000
    assert found["requests_per_s"] == 50.0
    assert found["outcomes"] == {"finished": 8000, "left": 2000}
    assert found["retries"] == {"finished": 3}
    assert found["faults"] == {"kill": 3, "kill router": 1}
    assert found["slowest_s"] == 7.0
    assert found["problems"] == 2


def test_a_line_goes_through_the_memory_at_the_ends_of_the_slices() -> None:
    memory = [100.0, 101.0, 102.0, 103.0, 104.0]
    books = [slice_of(n, {"router": mib, "redis": 5.0}) for n, mib in enumerate(memory)]
    books[0]["memory_mib"]["end"]["seldom"] = 1.0
    lines = memory_lines(books)
    assert lines["router"]["slope"] == pytest.approx(2.0)  # MiB in 10,000 requests
    assert lines["redis"]["slope"] == 0.0
    assert (lines["router"]["first"], lines["router"]["last"]) == (100.0, 104.0)
    assert "seldom" not in lines
