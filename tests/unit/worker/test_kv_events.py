"""KV events over real sockets, decoded by another msgpack library than the one that wrote them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from msgspec.structs import replace

from tandem.common.adapter import Adapter
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.worker import KvEventOptions, WorkerConfig
from tandem.engine.types import StepReport, StoredBlock
from tandem.errors import ConfigError
from tandem.worker.lifecycle.kv_events import KvEvents

ROOT = b"no block has this"
END = b"\xff" * 8
NUM_MANY = 15_000  # more than a queue and the system's buffers take


def config(**events: str) -> WorkerConfig:
    return WorkerConfig(
        role="decode",
        worker_id="decode-7",
        cluster=ClusterConfig(cluster_id="c", redis_url="redis://localhost", token="t"),
        engine=EngineConfig(model="smollm2", block_size=2),
        events=KvEventOptions(**events),
    )


def open_events(**events: str) -> KvEvents:
    return KvEvents(config(**events), "smollm2")


def stored(*hashes: bytes, parent: bytes = ROOT) -> list[StoredBlock]:
    """Blocks of a chain, from its first one on if the parent is the root."""
    first = int(parent != ROOT)
    links = zip((parent, *hashes), hashes, strict=False)
    return [StoredBlock(p, h, [h[0], 1], index) for index, (p, h) in enumerate(links, first)]


class Subscriber:
    """A subscriber, which binds or connects, and takes batches in their order."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.subscribe(b"kv@")
        self.replay = self.context.socket(zmq.DEALER)  # REQ takes one answer only
        self.endpoint, self.replay_endpoint = (f"ipc://{folder}/{n}" for n in ("events", "replay"))

    async def take(self) -> tuple[int, list[Any]]:
        """The number and the events of the next batch."""
        topic, number, payload = await asyncio.wait_for(self.events.recv_multipart(), 10)
        assert topic == b"kv@decode-7@smollm2"
        ts, events, rank = msgpack.unpackb(payload)
        assert (abs(ts - time.time()) < 60, rank) == (True, 0)
        return int.from_bytes(number, "big"), events

    async def take_again(self, first: int) -> list[tuple[int, bytes]]:
        """The kept batches from a number on."""
        await self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            _, number, payload = await asyncio.wait_for(self.replay.recv_multipart(), 10)
            if number == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))


@pytest_asyncio.fixture
async def subscriber(tmp_path: Path) -> AsyncIterator[Subscriber]:
    found = Subscriber(tmp_path)
    yield found
    found.context.destroy(linger=0)


async def subscribed(subscriber: Subscriber, events: KvEvents) -> None:
    """Reports until the subscriber has one batch: whoever comes later misses the ones before."""
    while not await subscriber.events.poll(20):
        events.on_report(StepReport(stored=stored(b"nobody"), removed=[b"nobody"]))
    while await subscriber.events.poll(50):
        await subscriber.take()


async def test_a_chain_is_one_event_that_names_its_parent(subscriber: Subscriber) -> None:
    events = open_events(kv_events=subscriber.endpoint)
    subscriber.events.connect(subscriber.endpoint)
    await subscribed(subscriber, events)
    events.on_report(StepReport(stored=stored(b"a", b"b") + stored(b"x")))
    first, found = await subscriber.take()
    assert found == [
        ["BlockStored", [b"a", b"b"], None, [97, 1, 98, 1], 2, None, "GPU", None],
        ["BlockStored", [b"x"], None, [120, 1], 2, None, "GPU", None],
    ]
    events.on_report(StepReport(stored=stored(b"c", parent=b"b"), removed=[b"x"]))
    second, found = await subscriber.take()
    assert second == first + 1
    assert found == [
        ["BlockStored", [b"c"], b"b", [99, 1], 2, None, "GPU", None],
        ["BlockRemoved", [b"x"], "GPU"],
    ]
    events.on_report(StepReport())  # nothing to tell: no batch
    # Nobody knows x any more: what comes after it is not told of, nor its end.
    events.on_report(StepReport(stored=stored(b"d", b"e", parent=b"x")))
    events.on_report(StepReport(stored=stored(b"f", parent=b"e"), removed=[b"d", b"c"]))
    third, found = await subscriber.take()
    assert (third, found) == (second + 1, [["BlockRemoved", [b"c"], "GPU"]])
    await events.aclose()


async def test_blocks_of_an_adapter_name_it_and_its_files(subscriber: Subscriber) -> None:
    events = open_events(kv_events=subscriber.endpoint, kv_events_replay=subscriber.replay_endpoint)
    subscriber.replay.connect(subscriber.replay_endpoint)
    one, other = (
        Adapter("legal", digest * 8, "/somewhere", 8) for digest in ("0000002a", "ffffffff")
    )
    of_adapters = [
        replace(block, adapter=adapter)
        for adapter, (block,) in ((one, stored(b"a")), (other, stored(b"b")))
    ]
    events.on_report(StepReport(stored=[*of_adapters, *stored(b"c")]))
    _, (_, payload) = await subscriber.take_again(0)
    assert [(event[1], event[5], event[7]) for event in msgpack.unpackb(payload)[1]] == [
        ([b"a"], 42, "legal"),
        ([b"b"], (1 << 31) - 1, "legal"),
        ([b"c"], None, None),
    ]
    await events.aclose()


async def test_a_worker_connects_to_a_subscriber_that_listens(subscriber: Subscriber) -> None:
    port = subscriber.events.bind_to_random_port("tcp://127.0.0.1")
    events = open_events(kv_events=f"tcp://127.0.0.1:{port}")
    await subscribed(subscriber, events)
    events.on_report(StepReport(stored=stored(b"a")))
    _, found = await subscriber.take()
    assert found[0][:2] == ["BlockStored", [b"a"]]
    await events.aclose()


async def test_batches_can_be_had_again_from_the_first(subscriber: Subscriber) -> None:
    events = open_events(kv_events=subscriber.endpoint, kv_events_replay=subscriber.replay_endpoint)
    subscriber.replay.connect(subscriber.replay_endpoint)
    events.on_report(StepReport(stored=stored(b"a")))
    events.on_report(StepReport(removed=[b"a"]))
    batches = await subscriber.take_again(0)
    assert [number for number, _ in batches] == [0, 1, 2]
    found = [msgpack.unpackb(payload)[1] for _, payload in batches]
    assert found[0] == [["AllBlocksCleared"]]
    assert [events[0][0] for events in found[1:]] == ["BlockStored", "BlockRemoved"]
    assert await subscriber.take_again(2) == batches[2:]
    assert await subscriber.take_again(3) == []
    await events.aclose()


async def test_blocks_without_token_ids_have_an_event_of_their_own(subscriber: Subscriber) -> None:
    """Imported blocks are known by their hashes alone; ids must not seem to be theirs."""
    events = open_events(kv_events=subscriber.endpoint, kv_events_replay=subscriber.replay_endpoint)
    subscriber.replay.connect(subscriber.replay_endpoint)
    imported = StoredBlock(ROOT, b"a")
    events.on_report(StepReport(stored=[imported, *stored(b"b", b"c", parent=b"a")]))
    _, (_, payload) = await subscriber.take_again(0)
    assert [event[1:4] for event in msgpack.unpackb(payload)[1]] == [
        [[b"a"], None, []],
        [[b"b", b"c"], b"a", [98, 1, 99, 1]],
    ]
    await events.aclose()


async def test_a_subscriber_that_does_not_read_delays_nobody(subscriber: Subscriber) -> None:
    """It misses batches, sees so by the numbers, and can have them again."""
    events = open_events(kv_events=subscriber.endpoint, kv_events_replay=subscriber.replay_endpoint)
    subscriber.events.set_hwm(1)
    subscriber.events.connect(subscriber.endpoint)
    subscriber.replay.connect(subscriber.replay_endpoint)
    await subscribed(subscriber, events)
    first, _ = (await subscriber.take_again(0))[-1]
    block = StoredBlock(ROOT, b"a", list(range(1000)))
    for _ in range(NUM_MANY):  # returns, though nobody reads
        events.on_report(StepReport(stored=[block]))
    read = []
    while await subscriber.events.poll(200):
        read.append((await subscriber.take())[0])
    last = first + NUM_MANY
    gap = min(set(range(first + 1, last + 1)) - set(read))  # there is one
    assert read == sorted(set(read))
    events.on_report(StepReport(removed=[b"a"]))
    number, found = await subscriber.take()
    assert (number, found) == (last + 1, [["BlockRemoved", [b"a"], "GPU"]])
    missed = await subscriber.take_again(gap)
    assert [number for number, _ in missed] == list(range(gap, last + 2))
    await events.aclose()


async def test_a_wrong_question_gets_no_answer_and_ends_nothing(subscriber: Subscriber) -> None:
    events = open_events(kv_events=subscriber.endpoint, kv_events_replay=subscriber.replay_endpoint)
    other = subscriber.context.socket(zmq.DEALER)
    other.connect(subscriber.replay_endpoint)
    await other.send_multipart([b"", b"not 8"])
    await other.send_multipart([b"x"])
    subscriber.replay.connect(subscriber.replay_endpoint)
    assert len(await subscriber.take_again(0)) == 1
    await events.aclose()


async def test_an_endpoint_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/no/such/folder"
    with pytest.raises(ConfigError, match=r"--kv-events ipc.*cannot be used"):
        open_events(kv_events=endpoint)
    with pytest.raises(ConfigError, match=r"--kv-events-replay ipc.*cannot be used"):
        open_events(kv_events=f"ipc://{tmp_path}/events", kv_events_replay=endpoint)


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ({"kv_events": "5557"}, "kv-events is '5557'; it must be tcp://HOST:PORT or ipc://PATH"),
        ({"kv_events": "tcp://host"}, "kv-events is 'tcp://host'"),
        ({"kv_events_replay": "tcp://*:5558"}, "kv-events-replay is set without kv-events"),
    ],
)
def test_wrong_options_are_named(events: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KvEventOptions(**events)
    assert named in refused.value.message
