"""Turns of connections that send little at a time."""

from __future__ import annotations

from tandem.api.http.server import _READS_OF_ADDRESS, SlowReads


async def test_each_address_has_its_turns_whatever_others_have() -> None:
    slow = SlowReads()
    read = list[str]()
    for number in range(3 * _READS_OF_ADDRESS):
        slow.wait("a", lambda number=number: read.append(f"a{number}"))  # type: ignore[misc]
    slow.wait("b", lambda: read.append("b"))
    first = [f"a{number}" for number in range(_READS_OF_ADDRESS)]
    slow._sweep()
    assert read == [*first, "b"]
    slow._sweep()
    assert len(read) == 2 * _READS_OF_ADDRESS + 1
    assert slow._timer is not None
    slow._sweep()
    assert len(read) == 3 * _READS_OF_ADDRESS + 1
    assert slow._waiting == {}
    assert slow._timer is None
