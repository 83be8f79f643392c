"""Weights in fp8 that the compiled decoder keeps: the bits of the numbers that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.weights.decoder_weights import (
    ExpertWeights,
    LayerWeights,
    Linear,
    Mlp,
    ModelWeights,
)
from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.quantized.fp8 import RUN, Fp8
from tandem.models.source import read_folder
from tandem_kernels.native import library
from tests.model_engines import make_runner
from tests.tiny_models import make_tiny_model
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.native_shapes import BASE, Shape

LIBRARY = library.load()
assert LIBRARY is not None, "the native kernels were not built"
NAMES = ("amx", "avx512_bf16", "avx512", "avx2", "plain")
INSTRUCTIONS = [name for name in NAMES if LIBRARY.instructions(name)]
ROUNDED = replace(BASE, weights=torch.bfloat16)
SHAPES = (
    BASE,
    replace(BASE, hidden=1100, inner=2050, bias=True, num_threads=2),
    replace(BASE, qk_norm="head", norms="around", window=20, is_odd=True, num_threads=3),
    replace(BASE, experts=5, bias=True, num_threads=3),
    replace(BASE, hidden=17, inner=1, vocab=1),
    replace(ROUNDED, hidden=100, inner=200, vocab=300, num_threads=3),
    replace(ROUNDED, hidden=1100, inner=2050, bias=True, num_threads=2),
    replace(ROUNDED, experts=9, has_sinks=True, window=20, bias=True, num_threads=2),
    replace(ROUNDED, norms="around", is_odd=True),
)


def in_fp8(linear: Linear, *, scales_of: str) -> Linear:
    """The nearest numbers of fp8, with scales of outputs, of runs of their inputs, or of blocks."""
    num_out, num_in = linear.weight.shape
    generator = torch.Generator().manual_seed(num_out)
    runs = 1 if scales_of == "outputs" else -(-num_in // RUN)
    scales = torch.rand(num_out, runs, generator=generator) / 100 + 1e-3
    if scales_of == "blocks":
        scales = scales[::RUN].repeat_interleave(RUN, 0)[:num_out]
    of_inputs = scales.repeat_interleave(num_in if runs == 1 else RUN, 1)[:, :num_in]
    data = (linear.weight.float() / of_inputs).clamp(-448, 448).to(torch.float8_e4m3fn)
    meta = torch.empty(linear.weight.shape, dtype=linear.weight.dtype, device="meta")
    return Linear(meta, linear.bias, Fp8(data, scales))


def expanded(linear: Linear) -> Linear:
    assert linear.blocks is not None
    return Linear(linear.blocks.numbers().to(linear.weight.dtype), linear.bias)


def each(weights: ModelWeights, of: Callable[[Linear], Linear]) -> ModelWeights:
    """The same weights with another form of all matrices but the embedding and routers."""

    def mlp(w: Mlp) -> Mlp:
        return Mlp(tuple(map(of, w.gate_up)), of(w.down))

    def layer(w: LayerWeights) -> LayerWeights:
        inner = (
            replace(w.mlp, mlps=tuple(map(mlp, w.mlp.mlps)))
            if isinstance(w.mlp, ExpertWeights)
            else mlp(w.mlp)
        )
        attention_out = of(w.attention_out)
        return replace(w, qkv=tuple(map(of, w.qkv)), attention_out=attention_out, mlp=inner)

    output = of(Linear(weights.output, None, weights.output_blocks))
    layers = tuple(map(layer, weights.layers))
    return replace(weights, layers=layers, output=output.weight, output_blocks=output.blocks)


def outputs(shape: Shape, weights: ModelWeights, instructions: str | None) -> list[torch.Tensor]:
    config = native_shapes.config_of(shape)
    decoder = NativeDecoder(
        config, weights, num_threads=shape.num_threads, instructions=instructions
    )
    kv = native_shapes.pools(shape)
    logits = [decoder.forward(batch, kv).clone() for batch in native_shapes.batches(shape)]
    return [*logits, native_shapes.contents(*kv)]


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(
    ("shape", "scales_of"),
    [
        pytest.param(shape, form, marks=[] if (i + 2) % 3 == j else pytest.mark.slow)
        for i, shape in enumerate(SHAPES)
        for j, form in enumerate(("outputs", "runs", "blocks"))
    ],
    ids=repr,
)
def test_products_have_the_bits_of_the_numbers(
    shape: Shape, scales_of: str, instructions: str
) -> None:
    kept = each(native_shapes.random_weights(shape), lambda w: in_fp8(w, scales_of=scales_of))
    ours = outputs(shape, kept, instructions)
    theirs = outputs(shape, each(kept, expanded), instructions)
    assert all(one.isfinite().all() for one in theirs)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_all_numbers_of_fp8(instructions: str) -> None:
    """Denormal ones, too, in all of a matrix's lanes."""
    shape = replace(ROUNDED, hidden=256, inner=64, vocab=64)
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[numbers % 128 == 127] = 1  # NaN
    data = torch.stack([numbers.roll(i) for i in range(64)]).view(torch.float8_e4m3fn)
    meta = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
    kept = replace(
        native_shapes.random_weights(shape),
        output=meta,
        output_blocks=Fp8(data, torch.full((64, 1), 0.37)),
    )
    assert kept.output_blocks is not None
    wide = replace(kept, output=kept.output_blocks.numbers().bfloat16(), output_blocks=None)
    assert all(
        map(torch.equal, outputs(shape, kept, instructions), outputs(shape, wide, instructions))
    )


def test_what_is_no_number_is_refused() -> None:
    data = torch.full((61, 40), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weights = replace(
        native_shapes.random_weights(BASE),
        output=torch.empty(61, 40, device="meta"),
        output_blocks=Fp8(data, torch.ones(61, 1)),
    )
    with pytest.raises(UnsupportedModel, match="is NaN"):
        NativeDecoder(native_shapes.config_of(BASE), weights, num_threads=1)


@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"])
def test_the_file_and_the_tensor_of_a_weight_that_is_no_number_are_named(
    part: str, tmp_path: Path
) -> None:
    folder, _ = make_tiny_model("llama", tmp_path)
    file, config_file = folder.path / "model.safetensors", folder.path / "config.json"
    stored = load_file(file)
    for name in [each for each in stored if each.endswith("_proj.weight")]:
        numbers = stored[name].to(torch.float8_e4m3fn)
        if name == f"model.layers.1.{part}.weight":
            numbers.view(torch.uint8)[3, 5] = 0xFF
        stored |= {name: numbers, f"{name}_scale": torch.ones(())}
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads(config_file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    config_file.write_text(json.dumps(config))
    where = re.escape(f"{file}: model.layers.1.{part}.weight has an fp8 weight")
    with pytest.raises(UnsupportedModel, match=where):
        make_runner(read_folder(folder.path))
