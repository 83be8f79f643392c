"""Quantized safetensors that stay so: blocks of the very numbers that a file stands for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.models.checkpoint.quantized.tensors import Coded
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder
from tandem_kernels.native.library import Kind
from tests.model_engines import make_runner
from tests.step_batches import logits_after
from tests.tiny_models import make_tiny_model
from tests.unit.models.checkpoint.quantized import test_tensors as forms

NUM_OUT, NUM_IN = 24, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PROMPT = list(range(30, 60))
SHUFFLED = (torch.randperm(NUM_IN, generator=forms.CHANCE) // 64).int()


def coded(quantization: dict[str, Any], **parts: torch.Tensor) -> Coded:
    return Coded("x", parts, forms.scheme_of(quantization))


def gptq(group_size: int, zeros: torch.Tensor, **more: torch.Tensor) -> Coded:
    return coded(
        forms.GPTQ | {"group_size": group_size},
        qweight=forms.packed(forms.nibbles(NUM_OUT, NUM_IN)).t().contiguous(),
        qzeros=forms.packed(zeros),
        scales=forms.floats(len(zeros), NUM_OUT).half(),
        **more,
    )


def gptq_8(**more: torch.Tensor) -> Coded:
    numbers = torch.randint(0, 256, (NUM_OUT, NUM_IN), generator=forms.CHANCE)
    return coded(
        forms.GPTQ_8 | {"group_size": 64},
        qweight=forms.packed(numbers, forms.BYTES).t().contiguous(),
        qzeros=forms.packed(torch.full((4, NUM_OUT), 127), forms.BYTES),
        scales=forms.floats(4, NUM_OUT).half(),
        **more,
    )


def awq(num_in: int, group_size: int, zeros: torch.Tensor) -> Coded:
    return coded(
        forms.AWQ | {"group_size": group_size},
        qweight=forms.packed(forms.nibbles(num_in, NUM_OUT), AWQ_ORDER),
        qzeros=forms.packed(zeros, AWQ_ORDER),
        scales=forms.floats(len(zeros), NUM_OUT).half(),
    )


def int8(scale: torch.Tensor) -> Coded:
    weight = torch.randint(-128, 128, (NUM_OUT, NUM_IN), generator=forms.CHANCE).to(torch.int8)
    return coded(forms.INT8, weight=weight, weight_scale=scale)


def int4(scale: torch.Tensor, zeros: torch.Tensor | None = None) -> Coded:
    more = {}
    if zeros is not None:
        more = {"weight_zero_point": forms.packed(zeros.t()).t().contiguous()}
    return coded(
        forms.INT4 if zeros is None else forms.INT4_ZEROS,
        **more,
        weight_packed=forms.packed(forms.nibbles(NUM_OUT, NUM_IN)),
        weight_scale=scale,
        weight_shape=torch.tensor([NUM_OUT, NUM_IN]),
    )


@pytest.mark.parametrize(
    ("matrix", "block_type"),
    [
        (gptq(64, forms.nibbles(4, NUM_OUT)), "Q4_Z64"),  # stored zeros, to which 1 is added
        (gptq(32, forms.nibbles(8, NUM_OUT)), "Q4_Z32"),
        (gptq(128, torch.full((2, NUM_OUT), 7)), "Q4_0"),
        (gptq(-1, torch.full((1, NUM_OUT), 15)), "Q4_Z64"),
        (gptq(64, forms.nibbles(4, NUM_OUT), g_idx=SHUFFLED), "Q4_Z64"),
        (gptq(64, torch.full((4, NUM_OUT), 7), g_idx=SHUFFLED), "Q4_0"),
        (awq(NUM_IN, 32, forms.nibbles(8, NUM_OUT)), "Q4_Z32"),
        (awq(NUM_IN, 128, forms.nibbles(2, NUM_OUT)), "Q4_Z64"),
        (awq(96, 32, forms.nibbles(3, NUM_OUT)), "Q4_Z32"),
        (awq(192, 64, forms.nibbles(3, NUM_OUT)), "Q4_Z64"),
        (awq(NUM_IN, 128, torch.full((2, NUM_OUT), 8)), "Q4_0"),
        (int4(forms.floats(NUM_OUT, 8).bfloat16()), "Q4_0"),
        (int4(forms.floats(NUM_OUT, 8).half(), forms.nibbles(NUM_OUT, 8)), "Q4_Z32"),
        (int4(forms.floats(NUM_OUT, 8).half(), torch.full((NUM_OUT, 8), 8)), "Q4_0"),
        (gptq_8(), "Q8_0"),
        (gptq_8(g_idx=SHUFFLED), "Q8_0"),
        (int8(forms.floats(NUM_OUT, 1).bfloat16()), "Q8_0"),
        (int8(torch.tensor(0.0625)), "Q8_0"),
    ],
)
def test_blocks_hold_the_same_numbers(matrix: Coded, block_type: str) -> None:
    blocks = matrix.blocks()
    assert blocks is not None
    assert (blocks.type.name, blocks.shape) == (block_type, matrix.shape)
    assert torch.equal(blocks.numbers(), matrix.numbers())
    rows = torch.tensor([7, 2, 3])
    assert torch.equal(blocks.in_order(rows).numbers(), matrix.numbers()[rows])


@pytest.mark.parametrize(
    "matrix",
    [
        int8(torch.full((NUM_OUT, 1), 0.1)),  # 24 bits
        int8(torch.full((NUM_OUT, 1), 2.0**17)),  # infinite in float16
        int4(torch.full((NUM_OUT, 8), 3e-6).bfloat16()),  # 3e-6 has 6 bits in float16
        coded(
            forms.INT8,
            weight=torch.ones(NUM_OUT, 40, dtype=torch.int8),
            weight_scale=torch.ones(NUM_OUT, 1),
        ),
    ],
)
def test_what_no_blocks_hold_exactly_is_left(matrix: Coded) -> None:
    assert matrix.blocks() is None
    packed = matrix.packed()
    assert packed is not None
    assert torch.equal(packed.numbers(), matrix.numbers())


def test_groups_of_different_sizes_are_left() -> None:
    of_input = (torch.arange(NUM_IN) // 60 % 4).int()
    matrix = gptq(64, forms.nibbles(4, NUM_OUT), g_idx=of_input)
    assert matrix.blocks() is None
    assert matrix.packed() is None


def test_groups_of_inputs_that_follow_one_another_may_be_stated() -> None:
    matrix = gptq(64, forms.nibbles(4, NUM_OUT), g_idx=(torch.arange(NUM_IN) // 64).int())
    blocks = matrix.blocks()
    assert blocks is not None
    assert torch.equal(blocks.numbers(), matrix.numbers())


def make_awq(path: Path, family: str, **sizes: int) -> ModelFolder:
    """A tiny model whose matrices but routers are AWQ's: random ones."""
    make_tiny_model(family, path, hidden_size=64, **sizes)
    file = path / "model.safetensors"
    config_file = path / "config.json"
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if tensor.ndim != 2 or ".layers." not in name or ".gate." in name:
            stored[name] = tensor.clone()
            continue
        num_out, num_in = tensor.shape
        module = name.removesuffix(".weight")
        stored[f"{module}.qweight"] = forms.packed(forms.nibbles(num_in, num_out), AWQ_ORDER)
        zeros = forms.nibbles(num_in // 32, num_out)
        stored[f"{module}.qzeros"] = forms.packed(zeros, AWQ_ORDER)
        stored[f"{module}.scales"] = (forms.floats(num_in // 32, num_out) / 40).half()
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"quantization_config": forms.AWQ}))
    return read_folder(path)


SIZES = {"intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("family", ["llama", "mixtral", "phi3"])
def test_a_checkpoint_stays_as_it_is(family: str, tmp_path: Path) -> None:
    folder = make_awq(tmp_path, family, **SIZES)
    kept = make_runner(folder)
    wide = make_runner(folder, dtype="float32")
    assert kept.dtype_name.endswith("+blocks")
    assert not wide.dtype_name.endswith("+blocks")
    assert kept.native is not None
    layer = kept.native._model.layers[1]
    mlp = layer.experts.contents.mlps[4] if layer.experts else layer.mlp
    assert {layer.qkv.kind, mlp.gate_up.kind, mlp.down.kind} == {Kind.Q4_Z32}
    both = torch.stack([logits_after(runner, PROMPT) for runner in (kept, wide)])
    assert 0.99 < torch.corrcoef(both)[0, 1] < 0.999999


def test_a_matrix_that_no_blocks_hold_is_converted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its neighbours q and v are converted with it: they are one product."""
    folder = make_awq(tmp_path, "llama", **SIZES)
    file = tmp_path / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(file).items()}
    name = "model.layers.1.self_attn.k_proj.scales"
    stored[name] = stored[name].float() * 1.001
    save_file(stored, file, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        kept = make_runner(folder)
        wide = make_runner(folder, dtype="float32")
    said = [line for line in caplog.messages if "cannot be repacked" in line]
    assert len(said) == 1
    assert "model.layers.1.self_attn.k_proj.weight" in said[0]
    assert kept.native is not None
    first = kept.native._model.layers[0]
    second = kept.native._model.layers[1]
    assert (first.qkv.kind, second.attention_out.kind) == (Kind.Q4_Z32, Kind.Q4_Z32)
    assert second.qkv.kind < Kind.Q8_0
    both = torch.stack([logits_after(runner, PROMPT) for runner in (kept, wide)])
    assert 0.99 < torch.corrcoef(both)[0, 1] < 0.999999
