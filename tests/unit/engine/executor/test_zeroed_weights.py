"""Weights of 4 bits with a zero for each group, and GPTQ's of 8 bits, through whole models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.triton.products import packed_weight, project
from tandem.engine.executor.weights.decoder_weights import LayerWeights, Linear, Mlp, ModelWeights
from tandem.engine.executor.weights.load import load_weights
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.gguf.tensors import GgufBlocks
from tandem.models.source import read_folder
from tandem_kernels.native.library import Kind
from tests.model_engines import make_runner
from tests.random_blocks import random_blocks
from tests.step_batches import logits_after
from tests.tiny_models import make_tiny_model
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.test_decoder import INSTRUCTIONS
from tests.unit.models.checkpoint.quantized import test_tensors as forms

PROMPT = list(range(30, 60))
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


def only_the_output(shape: native_shapes.Shape, output: GgufBlocks) -> ModelWeights:
    """A model whose layers add nothing, and whose token is 1 at the input of its number."""
    made = native_shapes.random_weights(shape)

    def nothing(w: LayerWeights) -> LayerWeights:
        assert isinstance(w.mlp, Mlp)
        down = Linear(torch.zeros(w.mlp.down.weight.shape), None)
        out = Linear(torch.zeros(w.attention_out.weight.shape), None)
        return replace(w, attention_out=out, mlp=replace(w.mlp, down=down))

    return replace(
        made,
        embedding=torch.eye(shape.vocab, shape.hidden),
        layers=tuple(map(nothing, made.layers)),
        final_norm=torch.ones(shape.hidden),
        output=torch.empty(output.shape, device="meta"),
        output_blocks=output,
    )


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("name", ["Q4_Z32", "Q4_Z64"])
def test_a_product_has_the_very_weights(name: str, is_shuffled: bool, instructions: str) -> None:
    """An input that is alone is rounded to 127 of its own scale, so each logit is a weight."""
    hidden = {"Q4_Z32": 96, "Q4_Z64": 128}[name]
    shape = replace(native_shapes.BASE, hidden=hidden, vocab=hidden)
    output = random_blocks(name, hidden, hidden)
    if is_shuffled:
        order = torch.randperm(hidden, generator=torch.Generator().manual_seed(1))
        output = replace(output, order=order.int())
    decoder = NativeDecoder(
        native_shapes.config_of(shape),
        only_the_output(shape, output),
        num_threads=2,
        instructions=instructions,
    )
    kv = native_shapes.pool(shape, hidden)
    tokens = [SequenceSlice([token], 1, [token], True) for token in range(hidden)]
    logits = decoder.forward(StepBatch(tokens), [kv])  # [token, output]
    normed = (1 / (1 / hidden + 1e-5)) ** 0.5
    torch.testing.assert_close(logits.t() / normed, output.numbers(), rtol=1e-5, atol=1e-7)


def awq(num_out: int, num_in: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix as AutoAWQ writes it, and its numbers as transformers has them."""
    numbers, zeros = forms.nibbles(num_in, num_out), forms.nibbles(num_in // GROUP, num_out)
    scales = (forms.floats(num_in // GROUP, num_out) / 40).half()
    parts = {
        "qweight": forms.packed(numbers, AWQ_ORDER),
        "qzeros": forms.packed(zeros, AWQ_ORDER),
        "scales": scales,
    }
    of_input = torch.arange(num_in) // GROUP
    return parts, ((numbers - zeros[of_input]) * scales[of_input].float()).t()


def gptq(num_out: int, num_in: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix of AutoGPTQ, with its inputs in the order of activations: each in another one."""
    numbers, zeros = forms.nibbles(num_in, num_out), forms.nibbles(num_in // GROUP, num_out)
    scales = (forms.floats(num_in // GROUP, num_out) / 40).half()
    of_input = torch.randperm(num_in, generator=forms.CHANCE) // GROUP
    parts = {
        "qweight": forms.packed(numbers.t()).t().contiguous(),
        "qzeros": forms.packed(zeros),
        "scales": scales,
        "g_idx": of_input.int(),
    }
    return parts, ((numbers - zeros[of_input] - 1) * scales[of_input].float()).t()


def gptq_8(num_out: int, num_in: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix of 8 bits of AutoGPTQ, symmetric, with its inputs in the order of activations."""
    numbers = torch.randint(0, 256, (num_out, num_in), generator=forms.CHANCE)
    scales = (forms.floats(num_in // GROUP, num_out) / 640).half()
    of_input = torch.randperm(num_in, generator=forms.CHANCE) // GROUP
    parts = {
        "qweight": forms.packed(numbers, forms.BYTES).t().contiguous(),
        "qzeros": forms.packed(torch.full((num_in // GROUP, num_out), 127), forms.BYTES),
        "scales": scales,
        "g_idx": of_input.int(),
    }
    return parts, (numbers - 128) * scales[of_input].float().t()


def int4(num_out: int, num_in: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix of compressed-tensors with zeros."""
    numbers, zeros = forms.nibbles(num_out, num_in), forms.nibbles(num_out, num_in // GROUP)
    scales = (forms.floats(num_out, num_in // GROUP) / 40).bfloat16()
    parts = {
        "weight_packed": forms.packed(numbers),
        "weight_zero_point": forms.packed(zeros.t()).t().contiguous(),
        "weight_scale": scales,
        "weight_shape": torch.tensor([num_out, num_in]),
    }
    of_input = torch.arange(num_in) // GROUP
    return parts, (numbers - zeros[:, of_input]) * scales.float()[:, of_input]


FORMS: dict[str, tuple[Callable[..., Any], dict[str, Any], Kind]] = {
    "awq": (awq, forms.AWQ, Kind.Q4_Z32),
    "gptq": (gptq, forms.GPTQ | {"desc_act": True}, Kind.Q4_Z32),
    "gptq_8": (gptq_8, forms.GPTQ_8 | {"desc_act": True}, Kind.Q8_0),
    "int4": (int4, forms.INT4_ZEROS, Kind.Q4_Z32),
}


class Checkpoint(NamedTuple):
    path: Path
    model: PreTrainedModel  # transformers' own, with the dequantized weights
    kind: Kind  # of the packed matrices


@pytest.fixture(scope="module", params=FORMS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """A tiny quantized Llama."""
    matrix, config, kind = FORMS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    _, model = make_tiny_model("llama", path, **SIZES)
    stored: dict[str, torch.Tensor] = {}
    dequantized: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor.clone()
            continue
        parts, dequantized[name] = matrix(*tensor.shape)
        stored |= {f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()}
    model.load_state_dict(dequantized, strict=False)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return Checkpoint(path, model, kind)


def runner_of(path: Path, **settings: Any) -> ModelRunner:
    return make_runner(read_folder(path), **settings)


def logprobs_of(path: Path, **settings: Any) -> torch.Tensor:
    return logits_after(runner_of(path, **settings), PROMPT).log_softmax(-1)


def expected_logprobs(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernels": "torch", "numerics": "invariant"},
        {"numerics": "invariant"},
        {"dtype": "float32"},
    ],
)
def test_log_probabilities_are_transformers(
    checkpoint: Checkpoint, settings: dict[str, Any]
) -> None:
    found = logprobs_of(checkpoint.path, **settings)
    torch.testing.assert_close(found, expected_logprobs(checkpoint.model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_multiplies_them_as_they_are(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """q, k and v are one matrix, unless their inputs are in other orders."""
    folder = read_folder(checkpoint.path)
    weights = load_weights(
        folder.weight_files,
        folder.config,
        dtype=dtype,
        device=torch.device("cpu"),
        kept_for="triton",
    )
    stored = checkpoint.model.state_dict()
    attention = "model.layers.1.self_attn"
    layer = weights.layers[1]
    has_orders = (
        isinstance(blocks := layer.qkv[0].blocks, PackedGroups) and blocks.order is not None
    )
    assert len(layer.qkv) == (3 if has_orders else 1)
    x = torch.randn(5, folder.config.hidden_size, generator=forms.CHANCE).to(dtype)
    qkv = torch.cat([stored[f"{attention}.{part}_proj.weight"] for part in "qkv"])
    for parts, wanted in (
        (layer.qkv, qkv),
        ((layer.attention_out,), stored[f"{attention}.o_proj.weight"]),
    ):
        assert all(part.blocks is not None and packed_weight(part.blocks) for part in parts)
        expected = x.float() @ wanted.to(dtype).float().t()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        found = project(x, parts).float()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_the_native_kernels_round_activations_alone(checkpoint: Checkpoint) -> None:
    runner = runner_of(checkpoint.path)
    assert runner.native is not None
    layer = runner.native._model.layers[1]
    assert {layer.qkv.kind, layer.mlp.gate_up.kind, layer.mlp.down.kind} == {checkpoint.kind}
    found = logits_after(runner, PROMPT).log_softmax(-1)
    expected = expected_logprobs(checkpoint.model)
    assert 0 < (found - expected).abs().max() < 0.1
    assert torch.corrcoef(torch.stack([found, expected]))[0, 1] > 0.999


def test_inputs_in_different_orders_are_parts_of_one_product(tmp_path: Path) -> None:
    blocks = [replace(random_blocks("Q4_Z32", 64, 64, seed), order=_order(seed)) for seed in (1, 2)]
    shape = replace(native_shapes.BASE, hidden=64, inner=64)
    made = native_shapes.random_weights(shape)
    meta = torch.empty(64, 64, device="meta")

    def gated(w: LayerWeights) -> LayerWeights:
        assert isinstance(w.mlp, Mlp)
        gate_up = tuple(Linear(meta, None, each) for each in blocks)
        return replace(w, mlp=replace(w.mlp, gate_up=gate_up))

    weights = replace(made, layers=tuple(map(gated, made.layers)))
    found, expected = (
        NativeDecoder(native_shapes.config_of(shape), each, num_threads=3)
        for each in (weights, native_shapes.widened(weights))
    )
    batch = native_shapes.batches(shape)[1]
    both = [decoder.forward(batch, [native_shapes.pool(shape)]) for decoder in (found, expected)]
    assert (both[0] - both[1]).norm() < 0.03 * both[1].norm()
    mlp = found._model.layers[0].mlp
    assert mlp.gate_up.rest
    assert mlp.gate_up.order


def _order(seed: int) -> torch.Tensor:
    return torch.randperm(64, generator=torch.Generator().manual_seed(seed)).int()
