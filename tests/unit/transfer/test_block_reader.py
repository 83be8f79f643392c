"""The peers that a consumer's agent knows, over an agent whose reads end when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pytest

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.transfer.reads import block_reader as consumer
from tandem.transfer.reads import piece_size
from tandem.transfer.reads.block_reader import BlockReader
from tandem.transfer.reads.messages import (
    LocalPool,
    PeerRank,
    Pull,
    PullResult,
    RemotePool,
    SomeHeads,
)
from tandem.transfer.reads.pull import EqualSizes, MixedSizes
from tests.grouped_toy import STATE, GroupedToyRunner
from tests.harness.simulated_nixl import SimulatedAgent, SimulatedFabric, SimulatedRead

LAYOUT = KvLayout.of_one(BlockLayout(8, 1, 1, 4, 8, "float32"))


@dataclass
class Bench:
    """A consumer, its agents in the order they were made, and memory that stands for peers."""

    memory: str = "DRAM"
    finish_copies: Callable[[], None] = lambda: None
    first_piece_bytes: int = piece_size.FIRST_BYTES
    now: float = 100.0
    layout: KvLayout = LAYOUT

    def __post_init__(self) -> None:
        self.agents: list[SimulatedAgent] = []
        self.blocks = np.zeros(self.layout.pool_bytes, np.uint8)
        self.theirs = np.ones(self.layout.pool_bytes, np.uint8)
        self.scratch = np.zeros(self.layout.pool_bytes, np.uint8)
        theirs = LocalPool(self.theirs.ctypes.data, self.theirs.nbytes, 0, self.memory, self.layout)
        self.remote = theirs.remote()
        address, num_bytes = self.blocks.ctypes.data, self.blocks.nbytes
        scratch = self.scratch.ctypes.data if self.memory == "VRAM" else None
        pool = LocalPool(address, num_bytes, 0, self.memory, self.layout, scratch)
        self.consumer = BlockReader(
            pool,
            self._new_agent,
            quarantine_blocks_max=4,
            first_piece_bytes=self.first_piece_bytes,
            clock=lambda: self.now,
            finish_copies=lambda: self.finish_copies(),
        )

    def _new_agent(self, number: int) -> SimulatedAgent:
        self.agents.append(SimulatedAgent(SimulatedFabric(), f"consumer-{number}"))
        return self.agents[-1]

    def connect(self, peer_id: str, metadata: str) -> None:
        self.consumer.connect(peer_id, [PeerRank(metadata.encode(), self.remote)])

    def start(self, pull_id: str, peer_id: str, block_id: int) -> None:
        self.consumer.submit(Pull(pull_id, peer_id, [1], [block_id], 5.0))
        assert self.consumer.poll() == []

    def land_all(self) -> None:
        self.land(self.agents[-1].reads.values())

    def land(self, reads: Iterable[SimulatedRead]) -> None:
        for read in reads:
            while read.waiting:
                self.agents[-1].land(read, 0)


def test_all_heads_are_all_bytes_of_each_group() -> None:
    """Blocks of the second group have a size that is no multiple of 3 heads."""
    pool = RemotePool(0, 6, 0, 0, "DRAM", pools=((4, 96), (2, 100)))
    whole = [(part.offset, part.stride, part.num_bytes) for part in pool.blocks().pools]
    assert whole == [(0, 96, 96), (4 * 96, 100, 100)]
    assert pool.blocks([SomeHeads(0, 3, 3)] * 2) == pool.blocks()
    assert pool.blocks([SomeHeads(1, 2, 3)] * 2).pools[0].offset == 32


def test_pieces_of_some_heads_of_a_slot_follow_each_other() -> None:
    """Two slots of 4 heads of 60 bytes, which are read in 3 pieces each."""
    pool = RemotePool(0, 10, 0, 0, "DRAM", pools=((4, 96), (6, 80)))
    blocks = pool.blocks([SomeHeads(0, 4, 4), SomeHeads(1, 3, 4, num_pieces=3)])
    assert blocks.pools[1] == (4 * 96 + 60, 6, 240, 40, 3)
    assert blocks.pools[1].runs() == [(4 * 96 + 60, 40, 3), (4 * 96 + 300, 40, 3)]
    whole = pool.blocks([SomeHeads(0, 4, 4), SomeHeads(0, 4, 4, num_pieces=3)])
    assert whole.pools[1].runs() == pool.blocks().pools[1].runs() == [(4 * 96, 80, 6)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_restarted_peer_takes_the_place_of_the_old_one(bench: Bench) -> None:
    bench.connect("a", "a-1")
    bench.connect("a", "a-2")
    assert bench.agents[0].peers == {"a-2"}
    bench.consumer.disconnect("a")
    assert bench.agents[0].peers == set()


def test_a_stale_peer_goes_when_its_last_given_up_read_has_ended(bench: Bench) -> None:
    bench.connect("a", "a-1")
    bench.connect("b", "b-1")
    bench.start("given up", "a", 3)
    bench.start("under way", "b", 4)  # keeps the agent from being made anew
    bench.consumer.disconnect("a")
    assert [result.reason for result in bench.consumer.poll()] == ["disconnected"]
    assert bench.agents[0].peers == {"a-1", "b-1"}, "a read of it may still land"
    bench.land_all()
    assert [result.pull_id for result in bench.consumer.poll()] == ["under way"]
    assert bench.agents[0].peers == {"b-1"}
    assert len(bench.agents) == 1


def test_an_agent_made_anew_knows_the_peers_before_a_pull_asks_for_them(bench: Bench) -> None:
    bench.connect("a", "a-1")
    bench.connect("b", "b-1")
    bench.connect("gone", "gone-1")
    bench.consumer.disconnect("gone")
    bench.start("given up", "a", 3)
    bench.consumer.cancel("given up")
    bench.now += consumer.GRACE_S
    while bench.consumer.wait_s() != 0.0:
        bench.consumer.poll()
    while bench.consumer.wait_s() == 0.0:
        bench.consumer.poll()
        bench.consumer.unfenced()
    assert bench.agents[0].is_closed
    assert bench.agents[1].peers == {"a-1", "b-1"}
    assert bench.consumer.num_renewals == 1
    assert bench.consumer.wait_s() is None, "nothing is left to do"


@pytest.mark.parametrize("memory", ["DRAM", "VRAM"])
def test_a_probe_reads_into_the_kind_of_memory_that_pulls_read_into(
    memory: str,
) -> None:
    """A read of a GPU's memory into host memory takes another path than a pull."""
    bench = Bench(memory)
    bench.connect("a", "a-1")
    bench.consumer.probe("probe", "a", 8, 5.0)
    assert bench.consumer.poll() == []
    agent = bench.agents[0]
    assert {memory} == {kind for _, kind in agent.registered}
    bench.land_all()
    assert [result.done for result in bench.consumer.poll()] == [True]
    assert not bench.blocks.any(), "a probe writes nothing into the pool"
    assert bench.scratch.all() == (memory == "VRAM")


def test_probes_of_a_gpus_pool_need_memory_on_the_gpu() -> None:
    pool = LocalPool(1, LAYOUT.pool_bytes, 0, "VRAM", LAYOUT)
    with pytest.raises(AssertionError, match="scratch memory on the GPU"):
        BlockReader(pool, lambda number: pytest.fail("no agent"), quarantine_blocks_max=4)


@pytest.mark.parametrize(("piece_blocks", "num_pieces"), [(4, 2), (8, 1)])
def test_a_pull_is_read_in_pieces_of_the_given_size(
    piece_blocks: int, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_size, "_BYTES_MIN", LAYOUT.block_bytes)
    bench = Bench(first_piece_bytes=piece_blocks * LAYOUT.block_bytes)
    bench.connect("a", "a-1")
    blocks = list(range(8))
    bench.consumer.submit(Pull("pull", "a", blocks, blocks, 5.0))
    for _ in range(2):
        assert bench.consumer.poll() == []
    assert len(bench.agents[0].reads) == num_pieces


@pytest.mark.parametrize("piece_bytes", [1, 8, 23, 24, 1000])
def test_blocks_of_equal_sizes_are_cut_as_mixed_ones_are(piece_bytes: int) -> None:
    equal, mixed = EqualSizes(7, 8), MixedSizes(np.full(7, 8))
    assert equal.num_blocks == mixed.num_blocks
    first = 0
    while first < equal.num_blocks:
        end = equal.end(first, piece_bytes)
        assert end == mixed.end(first, piece_bytes) == min(7, first + max(1, piece_bytes // 8))
        assert equal.num_bytes(first, end) == mixed.num_bytes(first, end)
        ids = np.arange(7)
        assert ids[equal.indices(first, end)].tolist() == ids[mixed.indices(first, end)].tolist()
        first = end


def test_pieces_have_the_given_size_if_blocks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """States follow the blocks of a prompt, and are larger: 64 bytes, and blocks have 8."""
    monkeypatch.setattr(piece_size, "_BYTES_MIN", 128)
    layout = GroupedToyRunner((None, STATE), block_size=1).layout(20, 4)
    bench = Bench(first_piece_bytes=128, layout=layout)
    bench.connect("a", "a-1")
    blocks = [*range(16), *range(20, 28)]
    bench.consumer.submit(Pull("pull", "a", blocks, blocks, 5.0))
    read: list[int] = []
    results: list[PullResult] = []
    while not results:
        results += bench.consumer.poll()
        for one in bench.agents[0].reads.values():
            if one.waiting:
                read.append(sum(copy.num_bytes for copy in one.waiting))
                bench.land([one])
    assert read == [128] * 5
    assert results[0].num_bytes == int(bench.blocks.sum()) == sum(read)


def test_blocks_are_unfenced_when_the_gpu_has_run_what_a_destroyed_agent_had_queued() -> None:
    """UCX does not wait for copies over CUDA IPC when it is destroyed."""
    bench = Bench("VRAM")
    queued: list[SimulatedRead] = []
    events: list[str] = []

    def finish_copies() -> None:
        assert bench.agents[0].is_closed, "copies may be queued until the agent is destroyed"
        events.append("finished")
        bench.land(queued)

    bench.finish_copies = finish_copies
    bench.connect("a", "a-1")
    bench.start("given up", "a", 3)
    queued.extend(bench.agents[0].reads.values())
    bench.consumer.cancel("given up")
    bench.now += consumer.GRACE_S
    bench.consumer.poll()
    block = bench.blocks[3 * LAYOUT.block_bytes :][: LAYOUT.block_bytes]
    assert block.all(), "a late copy has landed before the block is reused"
    assert bench.consumer.unfenced() == [3]
    assert events == ["finished"]
    bench.consumer.close()
    assert events == ["finished"], "there was no agent to destroy"


def test_the_pool_may_be_freed_after_close_also_on_a_gpu() -> None:
    bench = Bench("VRAM")
    closed: list[bool] = []
    bench.finish_copies = lambda: closed.append(bench.agents[0].is_closed)
    bench.connect("a", "a-1")
    bench.start("under way", "a", 3)
    bench.consumer.close()
    assert closed == [True]
    assert bench.consumer.unfenced() == [3]


def test_blocks_stay_fenced_if_the_gpu_does_not_answer() -> None:
    bench = Bench("VRAM")

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.finish_copies = fails
    bench.connect("a", "a-1")
    bench.start("given up", "a", 3)
    bench.consumer.cancel("given up")
    bench.now += consumer.GRACE_S
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench.consumer.poll()
    assert bench.consumer.unfenced() == []
