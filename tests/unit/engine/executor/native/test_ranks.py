"""Decoders that several processes compute together: all numbers equal those of one process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.cache.layout.pool_memory import create_shared, map_shared, size_shared
from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.native.packing import Panels, panels_of
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.weights.decoder_weights import ModelWeights
from tandem.engine.executor.weights.share import Share
from tandem.engine.scheduler.batch import StepBatch
from tandem_kernels.kv_cache import KvPool, make_pool
from tandem_kernels.native.library import RankEnded
from tests.kv_pools import some_channels
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.native_shapes import BASE, SHAPES, Shape
from tests.unit.engine.executor.native.test_fp8_weights import each, in_fp8
from tests.unit.engine.executor.native.test_fp8_weights import outputs as fp8_outputs

STEPS_DONE = "steps are done"


class OtherRanks:
    """Processes that compute the shapes that the test names, as ranks 1 and up."""

    def __init__(self, num: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for rank in range(1, num + 1):
            own, other = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(other, rank, os.getpid()), daemon=True)
            process.start()
            other.close()
            self._pipes.append(own)
            self._processes.append(process)

    def start(
        self, shape: Shape, memory_fd: int, pool_fd: int, num_ranks: int, fp8_scales: str = ""
    ) -> None:
        for pipe in self._pipes:
            pipe.send((shape, memory_fd, pool_fd, num_ranks, fp8_scales))
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].join()

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection[Any, Any], rank: int, parent_pid: int) -> None:
    while True:
        try:
            shape, memory_fd, pool_fd, num_ranks, fp8_scales = pipe.recv()
        except EOFError:
            return
        fds = [os.open(f"/proc/{parent_pid}/fd/{fd}", os.O_RDWR) for fd in (memory_fd, pool_fd)]
        memory = RankMemory(fds[0], rank=rank, num_ranks=num_ranks)
        decoder, pools = make(shape, memory, fds[1], is_new=False, fp8_scales=fp8_scales)
        pipe.send("ready")
        for message in memory.messages():
            if message.content == STEPS_DONE:
                break
            decoder.compute_share(message.content, message.numbers_address, pools)


def weights_of(shape: Shape, fp8_scales: str) -> ModelWeights:
    weights = native_shapes.random_weights(shape)
    return each(weights, partial(in_fp8, scales_of=fp8_scales)) if fp8_scales else weights


def make(
    shape: Shape, memory: RankMemory, pool_fd: int, *, is_new: bool, fp8_scales: str = ""
) -> tuple[NativeDecoder, list[KvPool]]:
    decoder = NativeDecoder(
        native_shapes.config_of(shape),
        weights_of(shape, fp8_scales),
        num_threads=shape.num_threads,
        memory=memory,
    )
    own = native_shapes.pools(shape)
    sizes = [each.memory.numel() for each in own]
    pages = (size_shared if is_new else map_shared)(pool_fd, sum(sizes))
    parts = torch.split(torch.frombuffer(pages, dtype=torch.uint8), sizes)
    pools = [
        make_pool(
            part.view_as(each.memory),
            each.layout,
            some_channels(each.layout) if each.layout.dtype == "int4" else None,
        )
        for part, each in zip(parts, own, strict=True)
    ]
    return decoder, pools


def outputs(
    shape: Shape, others: OtherRanks, num_ranks: int, fp8_scales: str = ""
) -> list[torch.Tensor]:
    memory = RankMemory.create(num_ranks)
    pool_fd = create_shared()
    assert pool_fd is not None
    decoder, pools = make(shape, memory, os.dup(pool_fd), is_new=True, fp8_scales=fp8_scales)
    others.start(shape, memory.fd, pool_fd, num_ranks, fp8_scales)
    found = [decoder.forward(batch, pools).clone() for batch in native_shapes.batches(shape)]
    memory.post(STEPS_DONE)
    return [*found, native_shapes.contents(*pools)]


@pytest.fixture(scope="module")
def one_more() -> Iterator[OtherRanks]:
    others = OtherRanks(1)
    yield others
    others.end()


@pytest.fixture(scope="module")
def three_more() -> Iterator[OtherRanks]:
    others = OtherRanks(3)
    yield others
    others.end()


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_two_ranks_compute_the_same_bits_as_one(shape: Shape, one_more: OtherRanks) -> None:
    alone = native_shapes.outputs(shape, None)
    assert all(map(torch.equal, alone, outputs(shape, one_more, 2)))


@pytest.mark.parametrize(
    "shape",
    [
        BASE,
        replace(BASE, vocab=17, inner=1),  # fewer panels than ranks
        replace(BASE, weights=torch.bfloat16, experts=5, num_threads=2),
        *(shape for shape in SHAPES if shape.blocks),
    ][:6],
    ids=repr,
)
def test_four_ranks_compute_the_same_bits_as_one(shape: Shape, three_more: OtherRanks) -> None:
    alone = native_shapes.outputs(shape, None)
    assert all(map(torch.equal, alone, outputs(shape, three_more, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8_scales", ["outputs", "runs", "blocks"])
def test_two_ranks_have_shares_of_fp8_weights(
    fp8_scales: str, dtype: torch.dtype, one_more: OtherRanks
) -> None:
    shape = replace(BASE, weights=dtype, hidden=160, inner=288, experts=3, num_threads=2)
    weights = weights_of(shape, fp8_scales)
    alone = fp8_outputs(shape, weights, instructions=None)
    assert all(map(torch.equal, alone, outputs(shape, one_more, 2, fp8_scales)))


@pytest.mark.parametrize("shape", [BASE, replace(BASE, window=20, is_odd=True, num_threads=2)])
def test_sums_of_blocks_are_those_of_one_process(shape: Shape, one_more: OtherRanks) -> None:
    (first, *_) = [batch for batch in native_shapes.batches(shape) if len(batch.slices) == 3]
    num_blocks = [-(-piece.context_len // shape.block_size) for piece in first.slices]
    found = []
    for others in (None, one_more):
        sums = [np.zeros(num, np.float32) for num in num_blocks]
        slices = [
            piece._replace(block_sums=None if i == 1 else own)
            for i, (piece, own) in enumerate(zip(first.slices, sums, strict=True))
        ]
        step = StepBatch(slices)
        if others is None:
            decoder = NativeDecoder(
                native_shapes.config_of(shape),
                native_shapes.random_weights(shape),
                num_threads=shape.num_threads,
            )
            decoder.forward(step, native_shapes.pools(shape))
        else:
            memory, pool_fd = RankMemory.create(2), create_shared()
            assert pool_fd is not None
            decoder, pools = make(shape, memory, os.dup(pool_fd), is_new=True)
            others.start(shape, memory.fd, pool_fd, 2)
            decoder.forward(step, pools)
            memory.post(STEPS_DONE)
        found.append(np.concatenate(sums))
    assert found[0].sum() > 0
    assert np.array_equal(*found)


def test_a_step_fails_when_a_rank_ends() -> None:
    others = OtherRanks(1)
    memory = RankMemory.create(2)
    pool_fd = create_shared()
    assert pool_fd is not None
    decoder, pools = make(BASE, memory, os.dup(pool_fd), is_new=True)
    others.start(BASE, memory.fd, pool_fd, 2)
    first, second, *_ = native_shapes.batches(BASE)
    decoder.forward(first, pools)
    others.kill(0)
    memory.break_up()
    with pytest.raises(RankEnded):
        decoder.forward(second, pools)
    others.end()


def test_the_shares_of_all_ranks_are_the_whole() -> None:
    for num_out in (1, 16, 17, 203, 4096):
        for num_ranks in (1, 2, 3, 4, 7):
            shares = [panels_of(Share(rank, num_ranks), num_out) for rank in range(num_ranks)]
            rows = [row for share in shares for row in range(num_out)[share.rows(num_out)]]
            assert rows == list(range(num_out))
    assert panels_of(Share(1, 2), 40) == Panels(1, 2)
