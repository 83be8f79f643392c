"""Pulls between workers of different numbers of ranks, of blocks and of states in pieces."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tandem.common.dtypes import IndexKeys
from tandem.engine.cache.layout import state_layout
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvGroup, KvLayout
from tandem.engine.cache.layout.state_layout import StateLayout
from tandem.models.config.linear_attention import Mamba2
from tandem.transfer.cuda_ipc.agent import BlockCopy, CudaIpcAgent
from tandem.transfer.reads.agent import ReadAgent
from tandem.transfer.reads.block_reader import BlockReader
from tandem.transfer.reads.messages import LocalPool, PeerRank, Pull
from tests.harness.simulated_nixl import SimulatedAgent, SimulatedFabric
from tests.harness.tensor_parallel_ranks import Bytes, moved, rank_pools, whole_model

NUM_SLOTS, NUM_BLOCKS = 3, 5


def layout_of(num_kv_heads: int) -> KvLayout:
    """A group of blocks, with keys of indexers if there is one head, and states of 12 heads whose
    slots have 3 pieces."""
    mamba = Mamba2(12, 3, key_dim=7, value_dim=16, kernel=4, has_conv_bias=True, has_biases=False)
    states = StateLayout.of(mamba, num_slots=NUM_SLOTS, num_layers=3, block_size=8)
    index = IndexKeys(2, 20) if num_kv_heads == 1 else None
    blocks = BlockLayout(NUM_BLOCKS, num_kv_heads, 2, 8, 16, "float32", index=index)
    return KvLayout((KvGroup((1, 4), None, blocks), KvGroup((0, 2, 3), 9, states)))


def pools_of(memories: Sequence[Bytes], layout: KvLayout) -> list[LocalPool]:
    num_ranks = len(memories)
    return [
        LocalPool(
            memory.ctypes.data,
            memory.nbytes,
            0,
            "DRAM",
            layout,
            rank=rank,
            num_ranks=num_ranks,
        )
        for rank, memory in enumerate(memories)
    ]


class HostDevice:
    """A device for `CudaIpcAgent` that copies at once, within this process."""

    def export(self, address: int) -> bytes:
        return str(address).encode()

    def open(self, metadata: bytes) -> int:
        return int(metadata)

    def close(self, address: int) -> None:
        pass

    def start_copy(self, copies: Sequence[BlockCopy]) -> HostDevice:
        for each in copies:
            pairs = zip(each.source_ids.tolist(), each.target_ids.tolist(), strict=True)
            for source, target in pairs:
                ctypes.memmove(
                    each.target + target * each.target_stride,
                    each.source + source * each.source_stride,
                    each.num_bytes,
                )
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def nixl(_: int) -> ReadAgent:
    agent = SimulatedAgent(SimulatedFabric(), "consumer")
    state: Callable[[int], Any] = agent.state

    def landed(handle: int) -> Any:
        while agent.reads[handle].waiting:
            agent.land(agent.reads[handle], 0)
        return state(handle)

    agent.state = landed  # type: ignore[method-assign]
    return agent


def cuda_ipc(_: int) -> ReadAgent:
    return CudaIpcAgent(HostDevice())


@pytest.mark.parametrize("make_agent", [nixl, cuda_ipc])
@pytest.mark.parametrize("num_kv_heads", [1, 4, 12])
@pytest.mark.parametrize(
    ("num_theirs", "num_ours"), [(2, 1), (1, 2), (2, 4), (4, 2), (1, 4), (2, 2), (2, 3), (3, 2)]
)
def test_each_rank_gets_its_heads_of_blocks_and_states(
    num_theirs: int,
    num_ours: int,
    num_kv_heads: int,
    make_agent: Callable[[int], ReadAgent],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if any(num_kv_heads % num and num % num_kv_heads for num in (num_theirs, num_ours)):
        pytest.skip("the ranks cannot share so many KV heads")
    monkeypatch.setattr(state_layout, "PIECE_BYTES_MAX", 9000)
    layout = layout_of(num_kv_heads)
    num_pieces = layout.groups[1].num_pieces
    assert num_pieces == 3
    whole = whole_model(1, layout)
    memories = rank_pools(whole, num_theirs)
    peers = [
        PeerRank(str(memory.ctypes.data).encode(), pool.remote())
        for memory, pool in zip(memories, pools_of(memories, layout), strict=True)
    ]
    theirs = [*layout.global_ids(0, [4, 0]), *layout.global_ids(1, [2])]
    ours = [*layout.global_ids(0, [1, 2]), *layout.global_ids(1, [0])]
    expected = rank_pools(moved(whole, layout, dict(zip(theirs, ours, strict=True))), num_ours)
    own = [np.zeros_like(memory) for memory in expected]
    for memory, pool, wanted in zip(own, pools_of(own, layout), expected, strict=True):
        reader = BlockReader(pool, make_agent, quarantine_blocks_max=4)
        reader.connect("peer", peers)
        reader.submit(Pull("pull", "peer", theirs, ours, 5.0))
        results = []
        for _ in range(100):
            results += reader.poll()
        assert [result.done for result in results] == [True], results
        blocks, states = (group.layout.block_bytes for group in pool.own_layout.groups)
        assert results[0].num_bytes == 2 * blocks + states
        assert np.array_equal(memory, wanted)
        reader.close()
