"""A subscriber follows a real worker's pool by its KV events alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.block_hash import block_hash
from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.prefix_index.entries import ENTRY_BYTES, NUM_BUCKETS
from tests.harness.client import complete_all, golden
from tests.harness.cluster import LocalCluster, wait_for

pytestmark = pytest.mark.service

NUM_BLOCKS = 40  # the prompts do not all fit: some blocks are evicted
PROMPTS, EXPECTED = golden(2, 3, 5, 6)


@pytest.fixture(scope="module")
def worker(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("events")
    cluster = LocalCluster(redis_server, folder)
    cluster.options = [
        *("--numerics", "invariant", "--num-blocks", str(NUM_BLOCKS)),
        *("--kv-events", f"ipc://{folder}/events", "--kv-events-replay", f"ipc://{folder}/replay"),
    ]
    try:
        yield cluster.start(prefill=0, decode=1)
    finally:
        cluster.close()


class Follower:
    """The set of blocks that the events tell of, and what is known of each."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.subscribe(b"")
        self.events.connect(f"ipc://{cluster.folder}/events")
        self.replay = self.context.socket(zmq.DEALER)  # REQ takes one answer only
        self.replay.connect(f"ipc://{cluster.folder}/replay")
        self.last = -1
        self.blocks: set[bytes] = set()
        self.num_roots = self.num_removed = 0

    def close(self) -> None:
        self.context.destroy(linger=0)

    def catch_up(self) -> None:
        """Takes all that was missed so far."""
        self.replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            assert self.replay.poll(10_000)
            _, number, payload = self.replay.recv_multipart()
            if not payload:
                return
            self.take(int.from_bytes(number, "big"), payload)

    def follow(self) -> None:
        """Takes what has come."""
        while self.events.poll(0):
            topic, number, payload = self.events.recv_multipart()
            assert topic == b"kv@decode-0@SmolLM2-135M-Instruct"
            self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        if number <= self.last:
            return  # it was had again already
        assert number == self.last + 1
        self.last = number
        for name, *fields in msgpack.unpackb(payload)[1]:
            if name == "AllBlocksCleared":
                self.blocks.clear()
            elif name == "BlockRemoved":
                assert self.blocks.issuperset(fields[0])
                self.blocks.difference_update(fields[0])
                self.num_removed += len(fields[0])
            else:
                self.store(*fields[:4])

    def store(
        self, hashes: list[bytes], parent: bytes | None, token_ids: list[int], block_size: int
    ) -> None:
        """Each hash is that of its parent and its tokens, so each event is about these tokens."""
        assert block_size == 16
        assert len(token_ids) == block_size * len(hashes)
        assert self.blocks.isdisjoint(hashes)
        self.num_roots += parent is None
        for i, name in enumerate(hashes):
            if parent is not None:
                assert parent in self.blocks
                assert name == block_hash(parent, token_ids[i * block_size : (i + 1) * block_size])
            self.blocks.add(name)
            parent = name


def held(cluster: LocalCluster) -> set[bytes]:
    """The entries of all blocks that the worker's engine finds by their hashes."""
    worker = cluster.workers["decode-0"]
    reply = worker.stub().ListBlocks(
        pb.ListBlocksRequest(first_bucket=0, end_bucket=NUM_BUCKETS),
        timeout=30,
        metadata=token_metadata(worker.token),
    )
    hashes = reply.hashes
    return {hashes[i : i + ENTRY_BYTES] for i in range(0, len(hashes), ENTRY_BYTES)}


async def test_a_subscriber_rebuilds_the_pool(worker: LocalCluster) -> None:
    await complete_all(worker, [PROMPTS[0]], max_tokens=2)
    follower = Follower(worker)  # late: it has missed the first events
    try:
        follower.catch_up()
        assert follower.blocks
        for round_ in range(2):
            order = PROMPTS if round_ else PROMPTS[::-1]
            answers = await complete_all(worker, order, max_tokens=32)
            expected = EXPECTED if round_ else EXPECTED[::-1]
            assert [a.token_ids for a in answers] == [tokens[:32] for tokens in expected]

        def is_equal() -> bool:
            follower.follow()
            return {h[:ENTRY_BYTES] for h in follower.blocks} == held(worker)

        wait_for(is_equal, deadline_s=10, what="the worker's own set")
        assert len(follower.blocks) > NUM_BLOCKS // 2
        assert follower.num_roots >= len({tokens[0] for tokens in PROMPTS})
        assert follower.num_removed > 0  # some were evicted on the way

        assert worker.workers["decode-0"].stub().ResetPrefixCache(
            pb.ResetPrefixCacheRequest(),
            timeout=30,
            metadata=token_metadata(worker.token),
        ).num_blocks == len(follower.blocks)
        wait_for(is_equal, deadline_s=10, what="an empty set")
        assert follower.blocks == set()
    finally:
        follower.close()
