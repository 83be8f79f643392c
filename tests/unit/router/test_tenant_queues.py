from __future__ import annotations

import asyncio
import math
import time

import pytest

from tandem.errors import Overloaded, QueueFull
from tandem.router.admission.tenant_queues import TenantQueues
from tandem.router.admission.turns import Claim


class Room:
    """Capacity for a number of requests. Each one that goes takes one place."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.line = TenantQueues(lambda: self.places > 0)
        self.went: list[str] = []

    async def ask(self, name: str, within_s: float = math.inf) -> None:
        until = time.monotonic() + within_s
        async with self.line.turn(Claim(name[0], may_shed=name[0] == "z"), until=until):
            self.places -= 1
            await asyncio.sleep(0)
            self.went.append(name)

    async def start(self, *names: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.ask(name)) for name in names]
        await settle()
        return tasks

    async def free(self, places: int) -> None:
        self.places += places
        self.line.release_next()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_goes_at_once_while_there_is_room_and_never_more() -> None:
    room = Room(2)
    await room.start("a0", "a1", "a2", "a3")
    assert room.went == ["a0", "a1"]
    assert room.line.must_wait()
    await room.free(1)
    assert room.went == ["a0", "a1", "a2"]
    await room.free(5)
    assert room.went == ["a0", "a1", "a2", "a3"]
    assert not room.line.must_wait()


async def test_tenants_take_turns() -> None:
    room = Room(0)
    await room.start("a0", "a1", "a2", "b0")
    assert room.line.cost_ahead(Claim("a")) == 4.0
    assert room.line.cost_ahead(Claim("c")) == 0.0
    await room.free(4)
    assert room.went == ["a0", "b0", "a1", "a2"]


async def test_who_goes_away_holds_up_nobody() -> None:
    room = Room(0)
    tasks = await room.start("a0", "a1", "a2")
    tasks[0].cancel()
    await settle()
    room.places = 1
    room.line.release_next()  # a1 may go, and goes away before it could
    tasks[1].cancel()
    await settle()
    assert room.went == ["a2"]
    assert [t.cancelled() for t in tasks] == [True, True, False]
    await room.free(1)
    assert not room.line.must_wait()


async def test_one_that_goes_away_in_the_turn_in_which_room_comes_holds_up_nobody() -> None:
    room = Room(0)
    tasks = await room.start("a0", "a1")
    tasks[0].cancel()  # it has not heard of it when it is let go
    room.places = 1
    room.line.release_next()
    await settle()
    assert room.went == ["a1"]
    assert tasks[0].cancelled()
    await room.free(1)
    assert not room.line.must_wait()


async def test_a_full_line_refuses() -> None:
    room = Room(0)
    room.line.waiting_max = 2
    tasks = await room.start("a0", "b0", "c0")
    with pytest.raises(QueueFull, match="2 requests already wait"):
        await tasks[2]
    await room.free(2)
    assert room.went == ["a0", "b0"]


async def test_a_full_line_refuses_the_one_that_floods_it() -> None:
    room = Room(0)
    room.line.waiting_max = 3
    tasks = await room.start("a0", "a1", "a2", "b0", "b1")
    for late in (tasks[2], tasks[4]):
        with pytest.raises(QueueFull, match="3 requests already wait"):
            await late
    await room.free(4)
    assert room.went == ["a0", "b0", "a1"]
    assert not room.line.must_wait()


async def test_a_full_line_refuses_first_what_may_be_shed() -> None:
    room = Room(0)
    room.line.waiting_max = 3
    tasks = await room.start("a0", "a1", "z0", "a2")
    with pytest.raises(QueueFull):
        await tasks[2]
    await room.free(4)
    assert room.went == ["a0", "a1", "a2"]


async def test_a_deadline_ends_the_wait() -> None:
    room = Room(0)
    late = asyncio.create_task(room.ask("a0", within_s=0.02))
    other = asyncio.create_task(room.ask("a1", within_s=60.0))
    with pytest.raises(Overloaded, match="too late"):
        await late
    await room.free(1)
    await other
    assert room.went == ["a1"]


async def test_one_that_is_released_at_its_deadline_goes() -> None:
    room = Room(0)
    task = asyncio.create_task(room.ask("a0", within_s=0.02))
    await settle()
    time.sleep(0.03)  # noqa: ASYNC251 - the deadline passes in the turn in which room comes
    room.places = 1
    room.line.release_next()
    await task
    assert room.went == ["a0"]
    room.places = 1
    assert not room.line.must_wait()


async def test_one_that_goes_away_when_it_is_refused_lets_only_one_go() -> None:
    room = Room(0)
    room.line.waiting_max = 1
    tasks = await room.start("a0")
    tasks.append(asyncio.create_task(room.ask("b0")))
    await asyncio.sleep(0)
    tasks[1].cancel()
    await settle()
    assert tasks[1].cancelled() or isinstance(tasks[1].exception(), QueueFull)
    await room.free(1)
    assert room.went == ["a0"]


async def test_one_that_breaks_when_let_go_holds_up_nobody() -> None:
    room = Room(1)

    async def breaks() -> None:
        async with room.line.turn(Claim("a")):
            raise OSError("broken")

    await asyncio.gather(breaks(), return_exceptions=True)
    await room.start("a1")
    assert room.went == ["a1"]
