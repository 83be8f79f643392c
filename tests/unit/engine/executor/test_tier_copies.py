"""Copies of whole blocks between host memory and the pools of several ranks.

Each rank is a thread of this process, with a device that copies as late as it can.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import Pipe

import numpy as np
import pytest
import torch

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.executor.ranks import tier_copies
from tandem.engine.executor.ranks.tier_copies import CopyServer, RankBlocks, RankCopies
from tandem.engine.tiers.storage import Bytes
from tests.late_device import LateDevice

NUM_BLOCKS, NUM_HEADS = 6, 2


class PinnedLateDevice(LateDevice):
    def pin(self, data: Bytes) -> bool:
        return True


class Ranks:
    """Ranks with a pool each. Heads and blocks have the bytes 16 * head + block."""

    def __init__(self, num_ranks: int) -> None:
        layout = KvLayout.of_one(
            BlockLayout(NUM_BLOCKS, NUM_HEADS, 1, block_size=4, head_dim=2, dtype="float32")
        )
        size = layout.groups[0].layout.head_bytes
        heads = torch.arange(NUM_HEADS)[:, None] * 16 + torch.arange(NUM_BLOCKS)
        self.memory = np.zeros(1 << 16, np.uint8)
        self.servers, self.pools, pipes = [], [], []
        for rank in range(num_ranks):
            first = rank * NUM_HEADS // num_ranks
            own = heads[first : first + max(1, NUM_HEADS // num_ranks)].T.contiguous()
            pool = own.to(torch.uint8)[:, :, None].expand(-1, -1, size).contiguous()
            server = CopyServer(pool.view(-1), layout, self.memory, rank=rank, num_ranks=num_ranks)
            self.pools.append(pool)
            self.servers.append(server)
            ours, theirs = Pipe()
            pipes.append(ours)
            if rank:
                server.start(theirs)
        self.pipes = pipes[1:]
        self.marks = [server.mark for server in self.servers]
        self.copies = RankCopies(self.memory, self.pipes, self.mark)
        self.servers[0].start(self.copies.own_end)
        self.blocks = RankBlocks(self.copies, 0, NUM_HEADS * size)
        self.whole = np.repeat(heads.numpy().T, size, axis=1)  # [NUM_BLOCKS, block_bytes]

    def mark(self, number: int) -> None:
        for mark in self.marks:
            mark(number)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Ranks]:
    monkeypatch.setattr(tier_copies, "_Cpu", PinnedLateDevice)
    return Ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_whole_block_is_copied_out_of_and_into_the_pools(
    num_ranks: int, make: Callable[[int], Ranks]
) -> None:
    """With 4 ranks, two ranks have the same head."""
    ranks = make(num_ranks)
    channel, mark = ranks.blocks.open_channel(), ranks.blocks.mark()
    ends = [channel.begin_out(block, mark, None) for block in range(NUM_BLOCKS)]
    for block, end in enumerate(ends):
        assert end().tolist() == ranks.whole[block].tolist()
    slot = ranks.blocks.host_pages(ranks.whole.shape[1]).data
    channel.begin_out(3, mark, slot)()
    channel.begin_in(1, slot, mark).synchronize()
    for pool in ranks.pools:
        assert torch.equal(pool[1], pool[3])
        assert not torch.equal(pool[0], pool[3])


def test_a_copy_starts_after_the_work_of_its_rank(make: Callable[[int], Ranks]) -> None:
    """Rank 1 has not taken the messages before the mark yet, among them the copy of a block."""
    ranks = make(2)
    late = ranks.marks.pop()
    channel, mark = ranks.blocks.open_channel(), ranks.blocks.mark()
    buffer = channel.buffer(2, None)
    buffer[:] = 99
    done = channel.begin_in(2, buffer, mark)
    done.links[0].wait(done.number)  # type: ignore[attr-defined]
    assert not done.query()
    pool = ranks.pools[1]
    assert pool[2].eq(16 + 2).all()
    server = ranks.servers[1]
    assert isinstance(server._device, LateDevice)
    server._device.work.queue(lambda: pool[5].copy_(pool[2]))
    late(mark.number)  # type: ignore[attr-defined]
    done.synchronize()
    assert done.query()
    assert pool[2].eq(99).all()
    assert pool[5].eq(16 + 2).all()


def test_a_copy_never_ends_if_a_rank_has_ended(make: Callable[[int], Ranks]) -> None:
    ranks = make(2)
    channel, mark = ranks.blocks.open_channel(), ranks.blocks.mark()
    first = channel.begin_in(0, channel.buffer(0, None), mark)
    first.synchronize()
    ranks.pipes[0].close()
    second = channel.begin_in(1, channel.buffer(1, None), mark)
    second.links[0].wait(second.number)  # type: ignore[attr-defined]
    assert first.query()
    assert not second.query()
