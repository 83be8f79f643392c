"""How many blocks a message over gRPC has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.net.rpc.block_bytes import decode
from tandem.net.rpc.options import MESSAGE_BYTES_MAX
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.grpc.producer import BlockServer
from tandem.worker.engine_process.link import PoolThroughEngine
from tandem.worker.engine_process.pool_view import MappedPool

IDS = list(range(19))


@dataclass
class Pool:
    """A pool whose blocks have the bytes of their ids."""

    message_bytes: int
    block_bytes: int
    reads: list[list[int]] = field(default_factory=list)

    @property
    def spans(self) -> BlockSpans:
        return BlockSpans.equal(self.block_bytes, len(IDS))

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> list[bytes]:
        assert sequence_id == "lease"
        self.reads.append(list(block_ids))
        return [bytes([block_id]) * self.block_bytes for block_id in block_ids]

    async def read_probe(self, num_bytes: int) -> bytes:
        self.reads.append([num_bytes])
        return bytes(num_bytes)


async def messages_of(pool: Pool) -> list[bytes]:
    owner: Any = SimpleNamespace(pool=pool)
    server = BlockServer(owner, lambda _: IDS, lambda _: None)
    request = pb.FetchBlocksRequest(lease_id="lease", block_ids=IDS)
    return [bytes(decode(message)) async for message in server.fetch(request, None)]


@pytest.mark.parametrize(
    ("pool_kind", "block_bytes", "blocks_a_message"),
    [
        (PoolThroughEngine, 2 << 20, [8, 8, 3]),  # Llama-3-8B in bfloat16, 16 tokens
        (PoolThroughEngine, 24 << 20, [1] * 19),
        (MappedPool, 2 << 20, [1] * 19),
        (MappedPool, 256 << 10, [4, 4, 4, 4, 3]),
    ],
)
async def test_a_message_through_the_engine_has_several_blocks(
    pool_kind: type[MappedPool | PoolThroughEngine], block_bytes: int, blocks_a_message: list[int]
) -> None:
    pool = Pool(pool_kind.message_bytes, block_bytes)
    messages = await messages_of(pool)
    assert [len(read) for read in pool.reads] == blocks_a_message
    assert [block_id for read in pool.reads for block_id in read] == IDS
    assert [len(message) for message in messages] == [n * block_bytes for n in blocks_a_message]
    assert [message[0] for message in messages] == [read[0] for read in pool.reads]
    assert max(map(len, messages)) < MESSAGE_BYTES_MAX


def test_runs_of_blocks_of_several_sizes_have_at_most_the_bytes() -> None:
    spans = BlockSpans(((10, 100), (4, 1000)))
    assert list(spans.split([0, 1, 2, 10, 11, 3], 1100)) == [[0, 1, 2], [10], [11, 3]]
    assert list(spans.split([10, 11], 10)) == [[10], [11]]
    assert list(spans.split([], 10)) == []


def test_blocks_of_several_sizes_are_divided_by_their_bytes() -> None:
    spans = BlockSpans(((10, 100), (4, 1000)))
    assert spans.shares([0, 1, 2, 3, 4], 2) == [range(2), range(2, 5)]
    assert spans.shares([0, 1, 2, 3, 10, 11, 12], 3) == [range(5 - 1), range(4, 5), range(5, 7)]
    assert spans.shares([10, 0, 1], 2) == [range(3)]
    assert spans.shares([0, 1], 5) == [range(1), range(1, 2)]


async def test_a_probe_reads_the_pools_device_in_the_messages_of_pulls() -> None:
    pool = Pool(PoolThroughEngine.message_bytes, 2 << 20)
    owner: Any = SimpleNamespace(pool=pool)
    server = BlockServer(owner, lambda _: None, lambda _: None)
    request = pb.ProbeRequest(num_bytes=pool.message_bytes + 5)
    messages = [bytes(decode(message)) async for message in server.probe(request, None)]
    assert pool.reads == [[pool.message_bytes], [5]]
    assert messages == [bytes(pool.message_bytes), bytes(5)]
