"""The order of pulls when bytes are short: no pull overtakes one of the same peer, and none waits
for ever."""

from __future__ import annotations

import asyncio

import pytest

from tandem.worker.kv_pulls.bytes_in_flight import BytesInFlight


class Pulls:
    """Pulls that last until they are told to end."""

    def __init__(self, bounds: BytesInFlight) -> None:
        self.bounds = bounds
        self.running: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, peer_id: str, num_bytes: int) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, peer_id, num_bytes))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()

    async def _run(self, name: str, peer_id: str, num_bytes: int) -> None:
        async with self.bounds.taken(peer_id, num_bytes):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def pulls() -> Pulls:
    return Pulls(BytesInFlight(bytes_max=10, peer_bytes_max=6))


async def test_a_peer_has_its_own_bound_and_does_not_hold_up_others(pulls: Pulls) -> None:
    await pulls.start("a1", "a", 4)
    await pulls.start("a2", "a", 4)
    await pulls.start("b1", "b", 4)
    assert pulls.running == ["a1", "b1"]
    await pulls.end("a1")
    assert pulls.running == ["b1", "a2"]


async def test_within_a_peer_a_small_pull_does_not_overtake_a_large_one(pulls: Pulls) -> None:
    await pulls.start("a1", "a", 4)
    await pulls.start("a2", "a", 5)
    await pulls.start("a3", "a", 1)
    assert pulls.running == ["a1"]
    await pulls.end("a1")
    assert pulls.running == ["a2", "a3"]


async def test_what_the_workers_bound_stops_is_not_overtaken(pulls: Pulls) -> None:
    for name, peer in (("a1", "a"), ("b1", "b")):
        await pulls.start(name, peer, 4)
    await pulls.start("c1", "c", 5)
    await pulls.start("d1", "d", 1)
    assert pulls.running == ["a1", "b1"]
    await pulls.end("a1")
    assert pulls.running == ["b1", "c1", "d1"]


async def test_a_pull_larger_than_the_bound_goes_alone(pulls: Pulls) -> None:
    await pulls.start("a1", "a", 1)
    await pulls.start("huge", "b", 100)
    assert pulls.running == ["a1"]
    await pulls.end("a1")
    await pulls.start("c1", "c", 1)
    assert pulls.running == ["huge"]
    await pulls.end("huge")
    assert pulls.running == ["c1"]


async def test_a_cancelled_waiter_leaves_the_line_and_a_cancelled_pull_gives_back(
    pulls: Pulls,
) -> None:
    await pulls.start("a1", "a", 6)
    await pulls.start("a2", "a", 6)
    await pulls.start("a3", "a", 1)
    await pulls.cancel("a2")
    assert pulls.bounds.num_waiting == 1
    await pulls.cancel("a1")
    assert pulls.running == ["a3"]
    await pulls.end("a3")
    assert pulls.bounds.num_bytes == 0


async def test_cancelled_in_the_moment_of_its_turn(pulls: Pulls) -> None:
    await pulls.start("a1", "a", 6)
    await pulls.start("a2", "a", 6)
    pulls._ends["a1"].set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # a1 gave back, a2's turn is set and a2 has not run yet
    await pulls.cancel("a2")
    assert pulls.bounds.num_bytes == 0


def test_a_cancelled_waiter_that_is_still_in_line_gets_no_turn() -> None:
    async def give_back_before_the_cancelled_task_runs() -> BytesInFlight:
        bounds = BytesInFlight(bytes_max=10, peer_bytes_max=10)
        await bounds._take("p", 10)
        waiting = asyncio.create_task(bounds._take("p", 10))
        await asyncio.sleep(0)
        waiting.cancel()
        bounds._give_back("p", 10)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return bounds

    bounds = asyncio.run(give_back_before_the_cancelled_task_runs())
    assert (bounds.num_bytes, bounds.num_waiting) == (0, 0)
