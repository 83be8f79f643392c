"""Workers of several ranks that pull over real NIXL: each rank's transfer thread is driven by rank
0, and each consumer has its own pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from queue import SimpleQueue

import numpy as np
import pytest

from tandem.common.config.transfer import TransferConfig
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.errors import TandemError
from tandem.transfer.nixl.agent import load_nixl
from tandem.transfer.ranks import RankTransfers, serve
from tandem.transfer.reads.messages import (
    LocalPool,
    PeerConnected,
    PeerRank,
    ProducerReady,
    Pull,
    Settled,
    TransferEvent,
    Unfenced,
)
from tandem.transfer.thread import TransferThread
from tests.harness.tensor_parallel_ranks import moved, rank_pools, whole_model

pytestmark = pytest.mark.service

try:
    load_nixl()
except TandemError as error:
    pytest.skip(error.message, allow_module_level=True)

DEADLINE_S = 20.0
LAYOUT = KvLayout.of_one(BlockLayout(32, 4, 2, 16, 64, "float32"))
PAIRS = {3: 7, 4: 8, 30: 0}


class Worker:
    """All ranks of a worker, as threads of this process."""

    def __init__(self, name: str, memories: list[np.ndarray], delay_s: float = 0.0) -> None:
        self.memories = memories
        self.events: SimpleQueue[TransferEvent] = SimpleQueue()
        pipes = []
        config = TransferConfig(delay_s=delay_s)
        makes = []
        for rank, memory in enumerate(memories):
            pool = LocalPool(
                memory.ctypes.data,
                memory.nbytes,
                0,
                "DRAM",
                LAYOUT,
                rank=rank,
                num_ranks=len(memories),
            )
            makes.append(partial(TransferThread, pool, config, f"{name}-{rank}"))
        for make in makes[1:]:
            here, there = Pipe()
            pipes.append(here)
            threading.Thread(target=serve, args=(there, make), daemon=True).start()
        self.transfers = RankTransfers(makes[0], pipes, self.events.put)
        self.transfers.start()

    def next(self) -> TransferEvent:
        return self.events.get(timeout=DEADLINE_S)

    def offer(self) -> list[PeerRank]:
        self.transfers.producer(1)
        ready = self.next()
        assert isinstance(ready, ProducerReady)
        assert [rank.error for rank in ready.ranks] == [""] * len(self.memories)
        return [PeerRank(rank.metadata, rank.pool) for rank in ready.ranks]


@pytest.fixture(params=[(2, 2), (2, 4), (4, 2)], ids=lambda p: f"{p[0]} ranks to {p[1]}")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Worker]]:
    num_theirs, num_ours = request.param
    whole = whole_model(1, LAYOUT)
    producer = Worker(f"producer-{num_theirs}-{num_ours}", rank_pools(whole, num_theirs))
    empty = [np.zeros_like(memory) for memory in rank_pools(whole, num_ours)]
    consumer = Worker(f"consumer-{num_theirs}-{num_ours}", empty, delay_s=0.2)
    consumer.transfers.connect("peer", producer.offer())
    connected = consumer.next()
    assert isinstance(connected, PeerConnected)
    assert not connected.error
    assert connected.reads
    yield producer, consumer
    for worker in (consumer, producer):
        worker.transfers.stop()


def pull(pull_id: str = "pull") -> Pull:
    return Pull(pull_id, "peer", list(PAIRS), list(PAIRS.values()), DEADLINE_S)


def test_a_pull_brings_every_rank_its_heads(pair: tuple[Worker, Worker]) -> None:
    _, consumer = pair
    consumer.transfers.submit(pull())
    settled = consumer.next()
    assert isinstance(settled, Settled)
    assert settled.result.done
    assert settled.result.num_blocks == len(PAIRS)
    assert settled.result.num_bytes == LAYOUT.spans.num_bytes(PAIRS)
    expected = rank_pools(moved(whole_model(1, LAYOUT), LAYOUT, PAIRS), len(consumer.memories))
    assert all(map(np.array_equal, consumer.memories, expected))


def test_a_cancelled_pull_gives_each_block_back_once(pair: tuple[Worker, Worker]) -> None:
    _, consumer = pair
    consumer.transfers.submit(pull())
    consumer.transfers.cancel("pull")
    settled = consumer.next()
    assert isinstance(settled, Settled)
    assert settled.result.reason == "cancelled"
    unfenced: list[int] = []
    while len(unfenced) < len(PAIRS):
        event = consumer.next()
        assert isinstance(event, Unfenced)
        unfenced += event.block_ids
    assert sorted(unfenced) == sorted(PAIRS.values())
    consumer.transfers.submit(pull("again"))
    settled = consumer.next()
    assert isinstance(settled, Settled)
    assert settled.result.done
