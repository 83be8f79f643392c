"""Quantized weights that torch and Triton keep: what products with their numbers give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tandem.engine.executor.torch.steps import TorchSteps
from tandem.engine.executor.triton.steps import TritonSteps
from tandem.engine.executor.weights import expand
from tandem.engine.executor.weights.decoder_weights import Linear, ModelWeights
from tandem.engine.executor.weights.load import load_weights
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups, by_columns
from tandem.models.folder import ModelFolder
from tandem.models.source import resolve
from tandem_kernels.blocks import widen
from tests.random_blocks import TYPES, ZEROED, random_blocks
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.native_shapes import QUANTIZED, QUANTIZED_BY_256, Shape
from tests.unit.engine.executor.native.test_fp8_weights import each, in_fp8

SHAPES = (
    replace(QUANTIZED, blocks=("Q5_0", "Q8_0", "Q4_1"), bias=True),
    replace(QUANTIZED_BY_256, blocks=("Q4_K", "Q6_K", "Q5_K", "Q8_0"), norms="around"),
    replace(QUANTIZED, blocks=("MXFP4",), experts=2, bias=True, has_sinks=True),
    replace(QUANTIZED, blocks=("Q4_0", "Q8_0", "Q5_1"), experts=2, is_odd=True),
)


@pytest.mark.parametrize("name", [*TYPES, *ZEROED])
def test_torch_widens_blocks_as_cpp_does(name: str) -> None:
    blocks = random_blocks(name, 6, 512)
    assert torch.equal(widen(blocks.data, blocks.type), blocks.numbers())


@pytest.mark.parametrize("name", TYPES)
def test_groups_are_the_numbers_of_their_blocks(name: str) -> None:
    blocks = random_blocks(name, 6, 512)
    groups = PackedGroups.of_blocks(blocks)
    assert torch.equal(groups.numbers(), blocks.numbers())
    rows = torch.tensor([4, 0])
    assert torch.equal(groups.in_order(rows).numbers(), blocks.numbers()[rows])
    twice = PackedGroups.joined([groups, groups.in_order(rows)])
    assert twice is not None
    assert torch.equal(twice.numbers(), torch.cat([blocks.numbers(), blocks.numbers()[rows]]))
    assert twice.scales.stride(0) == 1
    other = random_blocks("Q4_1" if name == "Q4_0" else "Q4_0", 6, 512)
    assert PackedGroups.joined([groups, PackedGroups.of_blocks(other)]) is None


def test_matrices_with_inputs_in_other_orders_are_not_joined() -> None:
    numbers = torch.randint(0, 16, (6, 64), generator=torch.Generator().manual_seed(1)).byte()

    def packed(seed: int) -> PackedGroups:
        groups = torch.randperm(64, generator=torch.Generator().manual_seed(seed)) // 32
        made = PackedGroups.of(numbers, torch.ones(6, 2), torch.tensor([[8]]).byte(), groups)
        assert made is not None
        return made

    twice = PackedGroups.joined([packed(1), packed(1)])
    assert twice is not None
    assert torch.equal(twice.numbers(), torch.cat([numbers, numbers]).float() - 8)
    assert PackedGroups.joined([packed(1), packed(2)]) is None
    assert PackedGroups.joined([packed(1), replace(packed(1), order=None)]) is None


def outputs(shape: Shape, weights: ModelWeights, numerics: str = "fast") -> list[torch.Tensor]:
    steps = TorchSteps(native_shapes.config_of(shape), weights, numerics)
    kv = native_shapes.pools(shape)
    batches = native_shapes.batches(shape)
    return [*(steps.forward(batch, kv).clone() for batch in batches), native_shapes.contents(*kv)]


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_model_computes_with_the_numbers(
    shape: Shape, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece: a few rows at a time."""
    monkeypatch.setattr(expand, "_NUMBERS_AT_ONCE", 1000)
    weights = native_shapes.random_weights(shape)
    ours = outputs(shape, weights, numerics)
    theirs = outputs(shape, native_shapes.widened(weights), numerics)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scales_of", ["outputs", "runs"])
def test_a_model_in_fp8(scales_of: str) -> None:
    shape = replace(native_shapes.BASE, hidden=300, bias=True)
    weights = each(native_shapes.random_weights(shape), lambda w: in_fp8(w, scales_of=scales_of))
    assert isinstance(weights.output_blocks, Fp8)
    ours, theirs = outputs(shape, weights), outputs(shape, native_shapes.widened(weights))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def smollm2() -> ModelFolder:
    return resolve("smollm2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="weights and pools are on the CPU")
@pytest.mark.parametrize(
    "shape",
    [SHAPES[1], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[2:])],
    ids=repr,
)
def test_triton_computes_what_torch_does(shape: Shape) -> None:
    check_triton(shape, grouped(native_shapes.random_weights(shape)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="weights and pools are on the CPU")
@pytest.mark.parametrize("scales_of", ["outputs", pytest.param("runs", marks=pytest.mark.slow)])
def test_triton_computes_fp8(scales_of: str) -> None:
    shape = replace(native_shapes.BASE, hidden=300, bias=True)
    weights = each(native_shapes.random_weights(shape), lambda w: in_fp8(w, scales_of=scales_of))
    check_triton(shape, each(weights, with_scales_by_columns))


def with_scales_by_columns(matrix: Linear) -> Linear:
    assert isinstance(matrix.blocks, Fp8)
    return replace(matrix, blocks=replace(matrix.blocks, scales=by_columns(matrix.blocks.scales)))


def check_triton(shape: Shape, weights: ModelWeights) -> None:
    """Compares logits with those of the torch kernels."""
    config = native_shapes.config_of(shape)
    steps = TritonSteps(config, weights, max_num_seqs=8, max_model_len=1000, step_tokens=512)
    kv = native_shapes.pools(shape)
    steps.prepare(kv)
    expected = outputs(shape, native_shapes.widened(weights))
    for batch, wanted in zip(native_shapes.batches(shape)[:2], expected, strict=False):
        found = steps.forward(batch, kv)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def grouped(weights: ModelWeights) -> ModelWeights:
    """The same as they are loaded for Triton."""
    return each(weights, lambda w: replace(w, blocks=PackedGroups.of_blocks(w.blocks)))


def test_matrices_of_a_file_stay_quantized(smollm2: ModelFolder) -> None:
    products: list[torch.Tensor] = []
    for kernels, form in (("torch", "GgufBlocks"), ("triton", "PackedGroups")):
        weights = load_weights(
            smollm2.weight_files,
            smollm2.config,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            kept_for=kernels,  # type: ignore[arg-type]
        )
        layer = weights.layers[0]
        assert type(layer.qkv[0].blocks).__name__ == form
        parts = [part.blocks for part in layer.qkv if part.blocks is not None]
        products.append(torch.cat([part.numbers() for part in parts]))
        assert len(parts) == (1 if kernels == "triton" else 3)
        assert weights.embedding.device.type == "meta"
        assert weights.device.type == "cpu"
    assert torch.equal(*products)
