"""Adapters in the compiled decoder against torch: shapes that hurt, on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.torch.steps import TorchSteps
from tandem.engine.executor.weights.lora import LoraLayer, LoraWeights
from tandem.engine.scheduler.batch import StepBatch
from tandem_kernels.lora import LoraPart
from tandem_kernels.native import library
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.native_shapes import BASE, QUANTIZED, QUANTIZED_BY_256, Shape

LIBRARY = library.load()
assert LIBRARY is not None, "the native kernels were not built"
NAMES = ("amx", "avx512_bf16", "avx512", "avx2", "plain")
CACHE_LINE = 64  # bytes
INSTRUCTIONS = [name for name in NAMES if LIBRARY.instructions(name)]
SHAPES = (
    BASE,
    replace(BASE, norms="around", is_odd=True, num_threads=3),
    replace(BASE, weights=torch.bfloat16, kv="bfloat16", hidden=100, inner=200, num_threads=2),
    replace(BASE, weights=torch.bfloat16, hidden=1100, inner=2050, bias=True, num_threads=2),
    replace(QUANTIZED, blocks=("Q4_1",), bias=True, num_threads=2),
    replace(QUANTIZED_BY_256, blocks=("Q4_K", "Q6_K"), weights=torch.bfloat16, kv="bfloat16"),
)


def adapter(shape: Shape, digest: str, rank: int, dtype: torch.dtype) -> LoraWeights:
    """Random parts of all products; the second layer has those of v and down only."""
    generator = torch.Generator().manual_seed(rank)

    def part(first: int, num_out: int, num_in: int) -> LoraPart:
        a = torch.randn(rank, num_in, generator=generator) / num_in**0.5
        b = torch.randn(num_out, rank, generator=generator) / rank**0.5
        # Numbers that both dtypes have.
        return LoraPart(first, a.bfloat16().to(dtype), b.bfloat16().to(dtype))

    kv_size = shape.num_kv_heads * shape.head_dim
    q_size, hidden, inner = shape.group * kv_size, shape.hidden, shape.inner
    v = part(q_size + kv_size, kv_size, hidden)
    down = (part(0, hidden, inner),)
    whole = LoraLayer(
        qkv=(part(0, q_size, hidden), part(q_size, kv_size, hidden), v),
        attention_out=(part(0, hidden, q_size),),
        gate_up=(part(0, inner, hidden), part(inner, inner, hidden)),
        down=down,
    )
    return LoraWeights(digest, (whole, LoraLayer((v,), (), (), down)))


def adapters(shape: Shape, dtype: torch.dtype) -> list[LoraWeights]:
    return [adapter(shape, f"rank-{rank}", rank, dtype) for rank in (1, 8, 17)]


def batches(shape: Shape) -> list[StepBatch]:
    digests = ("rank-8", "", "rank-17", "rank-8", "rank-1", "", "rank-17")
    return [
        StepBatch([s._replace(adapter=digests[i]) for i, s in enumerate(batch.slices)])
        for batch in native_shapes.batches(shape)
    ]


def native(shape: Shape, instructions: str, num_threads: int) -> NativeDecoder:
    decoder = NativeDecoder(
        native_shapes.config_of(shape),
        native_shapes.random_weights(shape),
        num_threads=num_threads,
        instructions=instructions,
    )
    for each in adapters(shape, shape.weights):
        decoder.adapters.add(decoder.pack_adapter(each))
    return decoder


def test_matrices_lie_in_the_order_in_which_a_step_reads_them() -> None:
    decoder = native(BASE, "plain", 1)
    packed = decoder.pack_adapter(adapter(BASE, "rank-8", 8, BASE.weights))
    addresses = []
    for layer in packed.layers:
        for product in (layer.qkv, layer.attention_out, layer.gate_up, layer.down):
            if product.num_parts:
                parts = product.parts[: product.num_parts]
                addresses += [product.a.panels, *(part.b.panels for part in parts)]
    assert addresses == sorted(addresses)
    assert len(addresses) == 11 + 4  # the second layer has v and down alone
    assert all(address % CACHE_LINE == 0 for address in addresses)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_it_computes_what_torch_does(shape: Shape, instructions: str) -> None:
    weights = native_shapes.widened(native_shapes.random_weights(shape))
    reference = TorchSteps(native_shapes.config_of(shape), weights, "fast")
    for each in adapters(shape, torch.float32):
        reference.add_adapter(each)
    decoder = native(shape, instructions, shape.num_threads)
    ours, theirs = native_shapes.pool(shape), native_shapes.pool(shape)
    is_rounded = shape.kv != "float32" or native_shapes.rounds_inputs(shape, instructions)
    tolerance = 3e-2 if is_rounded else 1e-4
    steps = [
        (decoder.forward(batch, [ours]).clone(), reference.forward(batch, [theirs]))
        for batch in batches(shape)
    ]
    if shape.blocks:  # products round their inputs to int8
        found, expected = map(torch.cat, zip(*steps, strict=True))
        assert (found - expected).norm() <= 0.03 * expected.norm()
        return
    for found, expected in steps:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", SHAPES[::2], ids=repr)
def test_bits_depend_on_neither_threads_nor_company(shape: Shape, instructions: str) -> None:
    seen = []
    for num_threads in (1, 3):
        for is_alone in (False, True):
            decoder, kv = native(shape, instructions, num_threads), native_shapes.pool(shape)
            logits = []
            for batch in batches(shape):
                if len(batch.slices) < 3:
                    continue
                if is_alone:
                    logits.append(decoder.forward(StepBatch([batch.slices[2]]), [kv])[0].clone())
                else:
                    logits.append(decoder.forward(batch, [kv])[1].clone())  # the second wants none
            seen.append(torch.stack(logits))
    assert all(torch.equal(each, seen[0]) for each in seen)
