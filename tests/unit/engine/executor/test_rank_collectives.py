"""What ranks exchange, in processes: through shared memory, and through torch.distributed with gloo
in place of NCCL, which needs GPUs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tandem.engine.executor.collectives import Collectives
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.ranks.nccl import NcclCollectives
from tandem.engine.executor.ranks.shared_memory import SharedMemoryCollectives
from tandem.engine.executor.sharded_logits import whole_logits
from tandem_kernels.native.library import RankEnded
from tandem_kernels.sampling import Draw, sample

NUM_RANKS = 3
ROWS = 5
KINDS = ("shared memory", "torch.distributed")


def whole(width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, width, generator=generator).to(dtype)


def logits(vocab_size: int) -> torch.Tensor:
    """Logits of which many are equal, with zeros of both signs, infinities and NaN."""
    rows = whole(vocab_size, torch.float32, 5).round()
    rows[1] = -0.0
    rows[1, 7] = 0.0
    rows[2, 40] = float("inf")
    rows[3] = float("-inf")
    rows[4, [90, 33]] = -float("nan")
    return rows


def make(kind: str, memory: RankMemory) -> Collectives:
    host = SharedMemoryCollectives(memory, splits_inputs=True)
    if kind == "shared memory":
        return host
    nccl = dist.init_process_group

    def gloo(backend: str, *, device_id: object, **more: Any) -> None:
        assert backend == "nccl"
        nccl("gloo", **more)

    dist.init_process_group = gloo
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return NcclCollectives(host, torch.device("cpu"))


def _serve(pipe: Connection[Any, Any], rank: int, parent_pid: int, memory_fd: int) -> None:
    torch.set_num_threads(1)
    fd = os.open(f"/proc/{parent_pid}/fd/{memory_fd}", os.O_RDWR)
    ranks = make(pipe.recv(), RankMemory(fd, rank=rank, num_ranks=NUM_RANKS))
    pipe.send("ready")
    while True:
        try:
            kind, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            if kind == "gather":
                width, dtype, seed = arguments
                own = ranks.share.of(width)
                x = whole(width, dtype, seed)[:, own.start : own.stop]
                pipe.send(ranks.gather(x, width).clone())
            elif kind == "logits":
                vocab_size, top_k = arguments
                own = ranks.share.of(vocab_size)
                x = logits(vocab_size)[:, own.start : own.stop]
                pipe.send(whole_logits(ranks, x, vocab_size, top_k).clone())
            elif kind == "broadcast":
                x = torch.full((3,), rank + 7)
                ranks.broadcast(x)
                pipe.send(x)
            else:
                width, dtype = arguments
                pipe.send(ranks.sum(whole(width, dtype, rank)).clone())
        except RankEnded as error:
            pipe.send(str(error))


class Ranks:
    def __init__(self, kind: str) -> None:
        self.memory = RankMemory.create(NUM_RANKS)
        spawn = multiprocessing.get_context("spawn")
        self.pipes: list[Connection[Any, Any]] = []
        self.processes = []
        for rank in range(NUM_RANKS):
            own, other = spawn.Pipe()
            arguments = (other, rank, os.getpid(), self.memory.fd)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            other.close()
            own.send(kind)
            self.pipes.append(own)
            self.processes.append(process)
        # Rank 0 prepares the memory, so no rank may use it before.
        assert [pipe.recv() for pipe in self.pipes] == ["ready"] * NUM_RANKS

    def call(self, *what: object) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self.pipes]

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def start() -> Iterator[Callable[[str], Ranks]]:
    started: list[Ranks] = []

    def make_ranks(kind: str) -> Ranks:
        started.append(Ranks(kind))
        return started[-1]

    yield make_ranks
    for ranks in started:
        ranks.end()


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_get_the_same_whole(kind: str, start: Callable[[str], Ranks]) -> None:
    ranks = start(kind)
    for seed, width in enumerate((12, 13, 203, 2)):  # with fewer columns than ranks, one has none
        for dtype in (torch.float32, torch.bfloat16):
            for found in ranks.call("gather", width, dtype, seed):
                assert torch.equal(found, whole(width, dtype, seed))
    assert [x.tolist() for x in ranks.call("broadcast")] == [[7, 7, 7]] * NUM_RANKS
    for width, dtype in ((96, torch.float32), (7, torch.bfloat16)):
        first, *others = ranks.call("sum", width, dtype)
        exact = sum(whole(width, dtype, rank).double() for rank in range(NUM_RANKS))
        tolerance = 1e-6 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(first.double(), exact, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_all_logits(kind: str, start: Callable[[str], Ranks]) -> None:
    vocab_size = 100
    ranks = start(kind)
    expected = logits(vocab_size)
    for top_k in (1, 2, 16):
        found = ranks.call("logits", vocab_size, top_k)[0]
        is_read = torch.ones_like(found, dtype=torch.bool)
        if top_k * NUM_RANKS * 2 <= vocab_size:
            is_read = found > float("-inf")
            assert is_read[0].sum() == top_k * NUM_RANKS
        assert torch.equal(found[:2][is_read[:2]], expected[:2][is_read[:2]])
        for min_p, temperature in ((0.0, 0.0), (0.0, 0.8), (0.5, 3.0)):
            draws = [
                Draw(temperature, k, 0.9, min_p, seed, position=9)
                for seed, k in enumerate([top_k, 1, top_k, max(1, top_k - 3), top_k])
            ]
            assert sample(found, draws) == sample(expected, draws)
    for found in ranks.call("logits", vocab_size, 0):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_no_rank_waits_for_one_that_has_ended(start: Callable[[str], Ranks]) -> None:
    ranks = start("shared memory")
    ranks.call("gather", 12, torch.float32, 0)
    ranks.processes[2].kill()
    for pipe in ranks.pipes[:2]:
        pipe.send(("gather", 12, torch.float32, 0))
    assert not ranks.pipes[0].poll(0.3)
    ranks.memory.break_up()  # as `Members` does when it sees the end of the process
    for pipe in ranks.pipes[:2]:
        assert pipe.recv() == "a rank of the tensor-parallel engine has ended"


def test_a_tensor_beyond_the_room_is_refused() -> None:
    memory = RankMemory.create(2)
    with pytest.raises(MemoryError, match="lower max-tokens-per-step"):
        memory.place(0, 0, (1 << 20, 1 << 10), torch.float32)
