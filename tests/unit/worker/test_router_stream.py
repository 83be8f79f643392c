"""One router's stream: what gathered travels together, and an end comes after all of it."""

from __future__ import annotations

import asyncio

import pytest

from tandem.errors import WorkerLost
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.decode.router_stream import RouterStream


async def test_what_gathered_is_one_message() -> None:
    stream = RouterStream()
    for number in range(3):
        stream.push(pb.SequenceUpdate(request_id=str(number)))
    stream.push_load(pb.WorkerLoad(num_running=2), 0)
    message = await stream.next_message()
    assert message is not None
    assert [update.request_id for update in message.sequences] == ["0", "1", "2"]
    assert message.load.num_running == 2


async def test_a_load_says_how_many_submits_it_shows() -> None:
    stream = RouterStream()
    stream.push_load(pb.WorkerLoad(), 100)  # of others' commands
    assert await _num_submits(stream) == 0
    stream.note_submit(101)
    stream.note_submit(104)
    stream.push_load(pb.WorkerLoad(), 100)  # taken before they were applied
    assert await _num_submits(stream) == 0
    stream.push_load(pb.WorkerLoad(), 103)
    assert await _num_submits(stream) == 1
    stream.push_load(pb.WorkerLoad(), 104)
    assert await _num_submits(stream) == 2


async def _num_submits(stream: RouterStream) -> int:
    message = await stream.next_message()
    assert message is not None
    return message.num_submits


async def test_an_ended_stream_gives_the_rest_and_then_none() -> None:
    stream = RouterStream()
    stream.push(pb.SequenceUpdate(request_id="0"))
    stream.end()
    message = await stream.next_message()
    assert message is not None
    assert len(message.sequences) == 1
    assert await stream.next_message() is None


async def test_a_stream_whose_commands_cannot_be_read_is_cut_off() -> None:
    stream = RouterStream()

    async def breaks() -> None:
        raise OSError("broken")

    reading = asyncio.create_task(breaks())
    reading.add_done_callback(stream.on_consumer_done)
    with pytest.raises(WorkerLost):
        await stream.next_message()
