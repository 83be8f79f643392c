"""Attention of the compiled decoder over bf16 and quantized KV: head sizes, groups and blocks that
hurt, and rows whose bits depend on themselves alone (all: layer 2's KV tells what layer 1 saw)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.common.kv_budget import VisibleKeys
from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.torch.steps import TorchSteps
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.native_shapes import BASE, Shape
from tests.unit.engine.executor.native.test_decoder import INSTRUCTIONS

OF_BF16 = replace(BASE, kv="bfloat16", num_kv_heads=1)
OF_INT8 = replace(OF_BF16, kv="int8")  # computed in fp32, unless weights are bf16
DOT_INT8 = replace(OF_INT8, weights=torch.bfloat16)
OF_INT4, DOT_INT4 = replace(OF_INT8, kv="int4"), replace(DOT_INT8, kv="int4")
OF_FP8 = replace(OF_INT8, kv="fp8_e4m3", weights=torch.bfloat16)  # in fp32 in any case
OF_K8V4, DOT_K8V4 = replace(OF_INT8, kv="k8v4"), replace(DOT_INT8, kv="k8v4")
SHAPES = (
    *(replace(OF_BF16, group=group) for group in (1, 2, 5, 8, 17)),
    *(replace(OF_BF16, head_dim=head_dim) for head_dim in (16, 48, 80, 112, 128, 256)),
    *(replace(OF_BF16, block_size=block_size) for block_size in (1, 8, 12, 64)),
    replace(OF_BF16, num_kv_heads=3, num_threads=2),
    *(replace(OF_INT8, group=group, head_dim=dim) for group, dim in ((1, 16), (5, 80), (17, 64))),
    *(replace(DOT_INT8, group=group, head_dim=dim) for group, dim in ((1, 16), (5, 80), (17, 64))),
    *(replace(of, block_size=size) for of in (OF_INT8, DOT_INT8) for size in (1, 12, 64)),
    *(replace(OF_FP8, group=group, head_dim=dim) for group, dim in ((1, 16), (17, 128))),
    replace(OF_FP8, block_size=12, has_sinks=True),
    *(replace(OF_K8V4, group=group, head_dim=dim) for group, dim in ((1, 16), (17, 128))),
    *(replace(DOT_K8V4, group=group, head_dim=dim) for group, dim in ((1, 16), (5, 80), (17, 64))),
    *(replace(of, block_size=size) for of in (OF_K8V4, DOT_K8V4) for size in (1, 12)),
    *(replace(of, has_sinks=True) for of in (OF_BF16, OF_INT8, DOT_INT8)),
    *(replace(OF_BF16, window=window) for window in (1, 16)),
    *(replace(OF_INT4, group=group, head_dim=dim) for group, dim in ((1, 16), (17, 128))),
    *(replace(DOT_INT4, group=group, head_dim=dim) for group, dim in ((1, 16), (5, 80), (17, 64))),
    *(replace(of, block_size=size) for of in (OF_INT4, DOT_INT4) for size in (1, 12)),
    *(replace(of, window=100) for of in (OF_FP8, DOT_K8V4, OF_INT4, DOT_INT4)),
    *(replace(of, window=100) for of in (OF_BF16, OF_INT8, DOT_INT8)),
    *(replace(of, window=128) for of in (OF_BF16, OF_INT8, DOT_INT8)),
)
OF_FP32 = replace(BASE, kv="float32", num_kv_heads=1)
BUDGETS = (
    *(
        replace(of, visible=VisibleKeys(20, 90))
        for of in (OF_FP32, OF_BF16, OF_INT8, DOT_INT8, OF_FP8, DOT_K8V4, OF_INT4, DOT_INT4)
    ),
    *(replace(OF_BF16, visible=VisibleKeys(*each)) for each in ((0, 1), (1, 64), (140, 30))),
    replace(OF_FP32, visible=VisibleKeys(70, 3), block_size=12, group=5),
    replace(OF_BF16, visible=VisibleKeys(4, 100), has_sinks=True),
)
SUMMED = (
    *(OF_FP32, OF_BF16, OF_INT8, DOT_INT8, OF_FP8, DOT_K8V4, OF_INT4, DOT_INT4),
    *(replace(of, block_size=12, group=5) for of in (OF_FP32, OF_BF16, DOT_INT8)),
    replace(OF_BF16, block_size=128),
    replace(OF_FP32, num_kv_heads=2, has_sinks=True),
)
WINDOWS = (*SHAPES[-10:], replace(BASE, kv="float32", num_kv_heads=1, window=100, group=5))
NUM_TOKENS = 330  # of two tiles and some, of items that one thread alone has and of smaller ones
# Shapes whose context has three pieces of 512 keys, which several threads compute.
NUM_LONG = 1300
LONG = (
    *(replace(OF_FP32, num_kv_heads=num, group=group) for num, group in ((1, 1), (2, 3))),
    replace(OF_BF16, group=5, has_sinks=True),
    *(replace(of, block_size=12) for of in (OF_INT8, DOT_INT4)),
    *(replace(of, window=700) for of in (OF_BF16, DOT_K8V4)),
    replace(OF_FP32, visible=VisibleKeys(530, 90)),
    replace(OF_FP8, visible=VisibleKeys(4, 600), head_dim=80),
)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", [*SHAPES, *BUDGETS], ids=repr)
def test_it_computes_what_torch_does(shape: Shape, instructions: str) -> None:
    native_shapes.compare(shape, instructions)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", [*SHAPES[1::3], *WINDOWS, *BUDGETS], ids=repr)
def test_a_row_does_not_know_its_chunk(shape: Shape, instructions: str) -> None:
    whole = _run(shape, instructions, [NUM_TOKENS])
    for cut in ([1] * NUM_TOKENS, [17, 1, 127, 1, 184], [128, 128, 74]):
        for ours, theirs in zip(_run(shape, instructions, cut), whole, strict=True):
            assert torch.equal(ours, theirs)
    threaded = _run(replace(shape, num_threads=3), instructions, [NUM_TOKENS])
    assert all(map(torch.equal, threaded, whole))


def test_what_lies_after_the_last_token_is_not_read() -> None:
    """Blocks are not cleared: there may be anything, also NaN."""
    for instructions, shape in product(
        INSTRUCTIONS, (OF_BF16, OF_INT8, DOT_INT8, OF_FP8, DOT_K8V4, DOT_INT4)
    ):
        clean = _run(shape, instructions, [33, 1])
        dirty = _run(shape, instructions, [33, 1], fill=0xFF)
        for ours, theirs in zip(dirty, clean, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", WINDOWS, ids=repr)
def test_what_lies_before_a_window_is_not_read(shape: Shape, instructions: str) -> None:
    """A block that the window has passed may be another's, or none."""
    cut = [40, 1, 100, 150, *[1] * 39]
    whole, _ = _run(shape, instructions, cut)
    passed, _ = _run(shape, instructions, cut, forgets=True)
    assert torch.equal(passed, whole)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", BUDGETS, ids=repr)
def test_what_a_kv_budget_hides_is_not_read(shape: Shape, instructions: str) -> None:
    """A block between the first tokens and the window may be another's, or none."""
    test_what_lies_before_a_window_is_not_read(shape, instructions)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", SUMMED, ids=repr)
def test_weights_of_blocks_add_up(shape: Shape, instructions: str) -> None:
    """A query has the weight 1 in each head of each layer, and a block does not get more or less of
    it for the chunk in which it is computed, or for the instructions (but for rounding)."""
    whole, plain = _sums(shape, instructions, [NUM_TOKENS]), _sums(shape, "plain", [NUM_TOKENS])
    for cut in ([1] * NUM_TOKENS, [17, 1, 127, 1, 184]):
        assert np.array_equal(_sums(shape, instructions, cut), whole)
    assert np.array_equal(_sums(replace(shape, num_threads=3), instructions, [NUM_TOKENS]), whole)
    num_weights = NUM_TOKENS * 2 * shape.num_kv_heads * shape.group
    if not shape.has_sinks:
        assert whole.sum() == pytest.approx(num_weights, rel=2e-3)
    assert whole == pytest.approx(plain, rel=2e-2)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", LONG, ids=repr)
def test_threads_that_divide_the_keys_compute_the_same_bits(
    shape: Shape, instructions: str
) -> None:
    """A single token is divided by its keys, because it has too few heads for the threads. The last
    token is also the first one of a piece, or sees nothing of the first piece."""
    for num in (NUM_LONG, 1025):
        whole = _run(shape, instructions, [num])
        for cut in ([num - 2, 1, 1], [500, 13, num - 514, 1]):
            for threads in (1, 3):
                divided = _run(replace(shape, num_threads=threads), instructions, cut)
                assert all(map(torch.equal, divided, whole))


def test_several_pieces_are_what_torch_computes() -> None:
    for shape in (replace(LONG[1], num_threads=2), replace(OF_BF16, num_threads=2)):
        logits, _ = _run(shape, INSTRUCTIONS[0], [NUM_LONG - 1, 1])
        config, weights = native_shapes.config_of(shape), native_shapes.random_weights(shape)
        steps = TorchSteps(config, native_shapes.widened(weights), "fast")
        token_ids, table = _tokens(shape, NUM_LONG)
        pool = native_shapes.pool(shape, len(table))
        expected = steps.forward(
            StepBatch([SequenceSlice(token_ids, NUM_LONG, table, True)]), [pool]
        )
        error = (logits - expected).norm() / expected.norm()
        assert error < (1e-5 if shape.kv == "float32" else 2e-2)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", [SUMMED[0], *SUMMED[-5:-2]], ids=repr)
def test_weights_of_blocks_add_up_over_pieces(shape: Shape, instructions: str) -> None:
    """Blocks of 12 tokens begin in one piece and end in the next one."""
    whole = _sums(shape, instructions, [NUM_LONG])
    for threads, cut in ((1, [500, 13, NUM_LONG - 513]), (3, [NUM_LONG - 1, 1])):
        shape = replace(shape, num_threads=threads)
        assert np.array_equal(_sums(shape, instructions, cut), whole)
    num_weights = NUM_LONG * 2 * shape.num_kv_heads * shape.group
    assert whole.sum() == pytest.approx(num_weights, rel=2e-3)


def _sums(shape: Shape, instructions: str, cut: Sequence[int]) -> npt.NDArray[np.float32]:
    sums = np.zeros(-(-sum(cut) // shape.block_size), np.float32)
    _run(shape, instructions, cut, sums=sums)
    return sums


def _run(
    shape: Shape,
    instructions: str,
    cut: Sequence[int],
    fill: int = 0,
    *,
    forgets: bool = False,
    sums: npt.NDArray[np.float32] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the last token, and the KV of all: [2, layers, heads, tokens, head_dim]; the pool
    has bytes of `fill` before. If it `forgets`, blocks that no later token sees become NaN, and the
    table names them no more."""
    token_ids, table = _tokens(shape, sum(cut))
    pool = native_shapes.pool(shape, len(table))
    pool.memory.fill_(fill)
    decoder = NativeDecoder(
        native_shapes.config_of(shape),
        native_shapes.random_weights(shape),
        num_threads=shape.num_threads,
        instructions=instructions,
    )
    done = 0
    in_use = table.copy()
    for num in cut:
        if forgets:
            num_first, num_last = shape.visible or (0, shape.window or done + 1)
            passed = slice(
                -(-num_first // shape.block_size), max(0, done + 1 - num_last) // shape.block_size
            )
            pool.memory[table[passed]] = 0xFF
            in_use[passed] = [2**30] * len(in_use[passed])
        piece = SequenceSlice(token_ids[done : done + num], done + num, in_use, True)
        if sums is not None:
            piece = piece._replace(block_sums=sums[: -(-(done + num) // shape.block_size)])
        piece = piece._replace(visible=shape.visible)
        logits = decoder.forward(StepBatch([piece]), [pool]).clone()
        done += num
    in_order = native_shapes.contents(pool)[:, :, table].transpose(2, 3).flatten(3, 4)
    return logits, in_order[..., :done, :]


def _tokens(shape: Shape, num: int) -> tuple[list[int], list[int]]:
    """Returns the ids of random tokens, and a block table for them."""
    choose = random.Random(5)
    token_ids = [choose.randrange(shape.vocab) for _ in range(num)]
    table = list(range(-(-num // shape.block_size)))
    choose.shuffle(table)
    return token_ids, table
