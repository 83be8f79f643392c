"""Blocks between tensor-parallel degrees that differ, over real NIXL: each rank has an agent."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.errors import TandemError
from tandem.transfer.nixl.agent import NixlAgent, load_nixl
from tandem.transfer.nixl.ucx_mode import UcxMode
from tandem.transfer.reads.agent import ReadState
from tandem.transfer.tensor_parallel import BlockPairs, ParallelLayout, descriptors
from tests.harness.tensor_parallel_ranks import Bytes, expected_pools, rank_pools, whole_model

pytestmark = pytest.mark.service

try:
    load_nixl()
except TandemError as error:
    pytest.skip(error.message, allow_module_level=True)

DEADLINE_S = 20.0
BLOCKS = BlockPairs([7, 8, 9, 3, 31], [2, 3, 4, 9, 0])


class Rank:
    """One rank's memory on the CPU, and the agent that owns it."""

    def __init__(self, name: str, pool: Bytes) -> None:
        self.pool = pool.copy()
        # A producer makes progress by itself; a consumer when it is asked for its reads.
        self.agent = NixlAgent(
            name, mode=UcxMode.MEMORY, progress_delay_us=10_000 if "source" in name else None
        )
        self.agent.register(
            address=self.pool.ctypes.data, num_bytes=pool.nbytes, device_id=0, memory="DRAM"
        )

    def read(self, producers: list[Rank], producer: ParallelLayout, local: ParallelLayout) -> None:
        """Reads this rank's share of BLOCKS."""
        rank = int(self.agent.name.rpartition("-")[2])
        for read in descriptors(producer, local, BLOCKS, local_rank=rank):
            peer = producers[read.producer_rank]
            start, here = peer.pool.ctypes.data, self.pool.ctypes.data
            handle = self.agent.create_read(
                self.agent.add_peer(peer.agent.metadata()),
                producer=[(start + part.producer_offset, part.num_bytes) for part in read.parts],
                producer_device=("DRAM", 0),
                local=[(here + part.local_offset, part.num_bytes) for part in read.parts],
                local_device=("DRAM", 0),
            )
            state = self.agent.start(handle)
            give_up_at = time.monotonic() + DEADLINE_S
            while state is ReadState.UNDER_WAY and time.monotonic() < give_up_at:
                state = self.agent.state(handle)
            assert state is ReadState.DONE
            self.agent.release(handle)


def whole_layout(heads: int) -> BlockLayout:
    return BlockLayout(32, heads, 4, 16, 64, "bfloat16")


def degrees(heads: int) -> list[int]:
    return [n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 or n % heads == 0]


@pytest.fixture(
    scope="module",
    params=[(heads, degree) for heads in (8, 6, 4, 3) for degree in degrees(heads)],
    ids=lambda param: f"{param[0]} heads, producer degree {param[1]}",
)
def producer(request: pytest.FixtureRequest) -> Iterator[tuple[ParallelLayout, list[Rank], Bytes]]:
    heads, degree = request.param
    layout = ParallelLayout(whole_layout(heads), degree)
    whole = whole_model(heads, layout.whole)
    pools = rank_pools(whole, layout)
    ranks = [Rank(f"producer-{heads}-{degree}-{rank}", pool) for rank, pool in enumerate(pools)]
    yield layout, ranks, whole
    for rank in ranks:
        rank.agent.close()


def test_every_rank_of_every_degree_has_its_heads_exactly(
    producer: tuple[ParallelLayout, list[Rank], Bytes],
) -> None:
    layout, producers, whole = producer
    for degree in degrees(layout.whole.num_kv_heads):
        local = ParallelLayout(layout.whole, degree)
        for number, expected in enumerate(expected_pools(whole, local, BLOCKS)):
            empty = np.zeros(local.rank_layout.pool_bytes, np.uint8)
            consumer = Rank(f"consumer-{degree}-{number}", empty)
            consumer.read(producers, layout, local)
            assert np.array_equal(consumer.pool, expected), (degree, number)
            consumer.agent.close()
