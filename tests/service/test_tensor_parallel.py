"""Blocks between workers with different numbers of ranks, over real NIXL: each rank has an agent
and a pool of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from tandem.engine.cache.layout import state_layout
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvGroup, KvLayout
from tandem.engine.cache.layout.state_layout import StateLayout
from tandem.errors import TandemError
from tandem.models.config.linear_attention import Mamba2
from tandem.transfer.nixl.agent import NixlAgent, load_nixl
from tandem.transfer.nixl.producer import readable_agent
from tandem.transfer.nixl.ucx_mode import UcxMode
from tandem.transfer.reads.block_reader import BlockReader
from tandem.transfer.reads.messages import LocalPool, PeerRank, Pull
from tests.harness.tensor_parallel_ranks import Bytes, moved, rank_pools, whole_model

pytestmark = pytest.mark.service

try:
    load_nixl()
except TandemError as error:
    pytest.skip(error.message, allow_module_level=True)

DEADLINE_S = 20.0
# Blocks of both KV groups: ids from 32 on are in the second pool of the producer, and from 12 on
# in that of the consumer. From 42 and from 17 on they are pieces of states, of the slots 1 and 2.
NUM_PIECES = 3
PAIRS = {7: 2, 8: 3, 9: 4, 3: 9, 31: 0, 32: 15, 40: 12} | {
    42 + NUM_PIECES + piece: 17 + 2 * NUM_PIECES + piece for piece in range(NUM_PIECES)
}
STATES = Mamba2(24, 3, key_dim=7, value_dim=16, kernel=4, has_conv_bias=True, has_biases=False)


def layout_of(heads: int, *sizes: int) -> KvLayout:
    states = StateLayout.of(STATES, num_slots=3, num_layers=3, block_size=16)
    assert states.num_pieces == NUM_PIECES
    groups = (
        KvGroup((0, 1, 2), None, BlockLayout(sizes[0], heads, 3, 16, 64, "bfloat16")),
        KvGroup((3,), 64, BlockLayout(sizes[1], heads, 1, 16, 64, "bfloat16")),
        KvGroup((4, 5, 6), 17, states),
    )
    return KvLayout(groups)


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_layout, "PIECE_BYTES_MAX", 20_000)
        yield


def pool_of(memory: Bytes, layout: KvLayout, rank: int, num_ranks: int) -> LocalPool:
    return LocalPool(
        memory.ctypes.data,
        memory.nbytes,
        0,
        "DRAM",
        layout,
        rank=rank,
        num_ranks=num_ranks,
    )


def rank_counts(heads: int) -> list[int]:
    return [n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 or n % heads == 0]


@pytest.fixture(
    scope="module",
    params=[(heads, count) for heads in (8, 6, 4, 3, 1) for count in rank_counts(heads)],
    ids=lambda param: f"{param[0]} heads, {param[1]} producer ranks",
)
def producer(
    _small_pieces: None, request: pytest.FixtureRequest
) -> Iterator[tuple[list[PeerRank], list[Bytes]]]:
    heads, num_ranks = request.param
    layout = layout_of(heads, 32, 10)
    whole = whole_model(heads, layout)
    memories = rank_pools(whole, num_ranks)
    agents = []
    ranks = []
    for rank, memory in enumerate(memories):
        pool = pool_of(memory, layout, rank, num_ranks)
        name = f"producer-{heads}-{num_ranks}-{rank}"
        agents.append(readable_agent(pool, name, UcxMode.MEMORY))
        ranks.append(PeerRank(agents[-1].metadata(), pool.remote()))
    yield ranks, whole
    for agent in agents:
        agent.close()


def pulled(pool: LocalPool, ranks: list[PeerRank]) -> None:
    """Reads the blocks PAIRS into the pool, and probes the peer first."""

    def make_agent(number: int) -> NixlAgent:
        name = f"consumer-{pool.num_ranks}-{pool.rank}-{number}"
        return NixlAgent(name, mode=UcxMode.MEMORY, progress_delay_us=None)

    reader = BlockReader(pool, make_agent, quarantine_blocks_max=8)
    reader.connect("peer", ranks)
    reader.probe("probe", "peer", 3, DEADLINE_S)
    reader.submit(Pull("pull", "peer", list(PAIRS), list(PAIRS.values()), DEADLINE_S))
    results = []
    give_up_at = time.monotonic() + DEADLINE_S
    while len(results) < 2 and time.monotonic() < give_up_at:
        results += reader.poll()
    own = pool.own_layout.spans
    assert {result.pull_id: (result.done, result.num_bytes) for result in results} == {
        "probe": (True, own.num_bytes(range(3))),
        "pull": (True, own.num_bytes(PAIRS.values())),
    }
    reader.close()


def test_every_rank_gets_its_heads_and_nothing_else(
    producer: tuple[list[PeerRank], list[Bytes]],
) -> None:
    ranks, whole = producer
    heads = whole[0].shape[1]
    layout = layout_of(heads, 12, 5)
    for num_ranks in rank_counts(heads):
        for rank, expected in enumerate(rank_pools(moved(whole, layout, PAIRS), num_ranks)):
            memory = np.zeros_like(expected)
            pulled(pool_of(memory, layout, rank, num_ranks), ranks)
            assert np.array_equal(memory, expected), (num_ranks, rank)
