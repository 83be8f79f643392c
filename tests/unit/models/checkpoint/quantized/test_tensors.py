"""Quantized safetensors: their numbers, packed here bit by bit, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.executor.weights.decoder_weights import ExpertWeights, Mlp
from tandem.engine.executor.weights.load import load_weights
from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.quantized.tensors import Coded, join_parts
from tandem.models.config.quantization import has_kv_scales, read_quantization
from tandem.models.config.quantization_scheme import Scheme
from tandem.models.source import read_folder
from tests.tiny_models import make_tiny_model

NUM_OUT, NUM_IN, GROUP = 16, 128, 32
NUM_GROUPS = NUM_IN // GROUP
CHANCE = torch.Generator().manual_seed(0)


def packed(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """The numbers of a row in int32, as many in each as `order` has places: 8 of 4 bits, or 4 of 8
    bits. `order` says which of them is in each place."""
    rows, columns = numbers.shape
    word = len(order)
    words = torch.zeros(rows, columns // word, dtype=torch.int64)
    for row in range(rows):
        for column in range(columns):
            place = order.index(column % word)
            words[row, column // word] |= int(numbers[row, column]) << 32 // word * place
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def nibbles(*size: int) -> torch.Tensor:
    return torch.randint(0, 16, size, generator=CHANCE)


def floats(*size: int) -> torch.Tensor:
    return torch.rand(size, generator=CHANCE) + 0.5


def compressed(**weights: object) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def targets(names: object) -> dict[str, Any]:
    """A config of int8 for these targets."""
    (group,) = INT8["config_groups"].values()
    return INT8 | {"config_groups": {"group_0": group | {"targets": names}}}


FP8 = {"quant_method": "fp8"}
BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FLOAT = compressed(num_bits=8, type="float", strategy="channel", symmetric=True) | {
    "format": "float-quantized"
}
INT8 = compressed(num_bits=8, type="int", strategy="channel", symmetric=True) | {
    "format": "int-quantized"
}
INT4 = compressed(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True) | {
    "format": "pack-quantized"
}
INT4_ZEROS = INT4 | compressed(
    num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False
)
MODEL_OPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
STATIC_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
GPTQ_8 = GPTQ | {"bits": 8, "sym": True}
BYTES = (0, 1, 2, 3)  # the order of numbers of 8 bits
ORDERS = {8: tuple(range(8)), 4: BYTES}  # by the numbers in a word
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}


def scheme_of(quantization: dict[str, Any]) -> Scheme:
    found = read_quantization({"quantization_config": quantization})
    assert found is not None
    scheme = found.of("x")
    assert scheme is not None
    return scheme


def check(quantization: dict[str, Any], expected: torch.Tensor, **parts: torch.Tensor) -> None:
    coded = Coded("x", parts, scheme_of(quantization))
    coded.check()
    assert coded.shape == tuple(expected.shape)
    torch.testing.assert_close(coded.numbers(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(coded.packed().numbers(), coded.numbers())
    assert torch.equal(coded.packed().between(3, 9).numbers(), coded.numbers()[3:9])


def test_fp8_with_a_scale() -> None:
    weight = torch.randn(NUM_OUT, NUM_IN, generator=CHANCE).to(torch.float8_e4m3fn)
    check(FP8, weight.float() * 0.5, weight=weight, weight_scale=torch.tensor(0.5))
    scales = floats(NUM_OUT, 1)
    check(MODEL_OPT, weight.float() * 0.5, weight=weight, weight_scale=torch.tensor(0.5))
    check(FLOAT, weight.float() * scales, weight=weight, weight_scale=scales)


def test_fp8_with_a_scale_for_each_block() -> None:
    weight = torch.randn(200, 300, generator=CHANCE).to(torch.float8_e4m3fn)
    scales = floats(2, 3)
    expected = weight.float()
    for row in range(2):
        for column in range(3):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            expected[block] *= scales[row, column]
    check(BLOCK_FP8, expected, weight=weight, weight_scale_inv=scales)


def test_int8() -> None:
    weight = torch.randint(-127, 128, (NUM_OUT, NUM_IN), generator=CHANCE).to(torch.int8)
    scales = floats(NUM_OUT, 1)
    check(INT8, weight.float() * scales, weight=weight, weight_scale=scales)


def test_packed_int4() -> None:
    numbers = nibbles(NUM_OUT, NUM_IN)
    scales = floats(NUM_OUT, NUM_GROUPS).bfloat16()
    check(
        INT4,
        (numbers - 8) * scales.float().repeat_interleave(GROUP, 1),
        weight_packed=packed(numbers),
        weight_scale=scales,
        weight_shape=torch.tensor([NUM_OUT, NUM_IN]),
    )


@pytest.mark.parametrize("order", ["none", "unset", "shuffled"])
def test_packed_int4_with_zeros(order: str) -> None:
    """Outputs do not fill the words of zeros, and inputs may be in the order of activations."""
    num_out = 13
    numbers = nibbles(num_out, NUM_IN)
    zeros = nibbles(num_out, NUM_GROUPS)
    scales = floats(num_out, NUM_GROUPS).bfloat16()
    of_input = torch.arange(NUM_IN) // GROUP
    parts = {"unset": {"weight_g_idx": torch.full((NUM_IN,), -1).int()}}.get(order, {})
    if order == "shuffled":
        of_input = of_input[torch.randperm(NUM_IN, generator=CHANCE)]
        parts = {"weight_g_idx": of_input.int()}
    padded = torch.cat((zeros, torch.zeros(16 - num_out, NUM_GROUPS, dtype=zeros.dtype)))
    check(
        INT4_ZEROS,
        (numbers - zeros[:, of_input]) * scales.float()[:, of_input],
        weight_packed=packed(numbers),
        weight_zero_point=packed(padded.t()).t().contiguous(),
        weight_scale=scales,
        weight_shape=torch.tensor([num_out, NUM_IN]),
        **parts,
    )


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_of_8_bits(form: str, shuffled: bool) -> None:
    numbers = torch.randint(0, 256, (NUM_OUT, NUM_IN), generator=CHANCE)
    scales = floats(NUM_GROUPS, NUM_OUT).half()
    of_input = torch.arange(NUM_IN) // GROUP
    parts = {}
    if shuffled:
        of_input = of_input[torch.randperm(NUM_IN, generator=CHANCE)]
        parts["g_idx"] = of_input.int()
    zeros = torch.full((NUM_GROUPS, NUM_OUT), 127 if form == "gptq" else 128)
    check(
        GPTQ_8 | {"checkpoint_format": form},
        (numbers - 128) * scales[of_input].float().t(),
        qweight=packed(numbers, BYTES).t().contiguous(),
        qzeros=packed(zeros, BYTES),
        scales=scales,
        **parts,
    )


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq(form: str, shuffled: bool) -> None:
    numbers = nibbles(NUM_IN, NUM_OUT)
    zeros = nibbles(NUM_GROUPS, NUM_OUT)
    scales = floats(NUM_GROUPS, NUM_OUT).half()
    of_input = torch.arange(NUM_IN) // GROUP
    parts = {}
    if shuffled:
        of_input = of_input[torch.randperm(NUM_IN, generator=CHANCE)]
        parts["g_idx"] = of_input.int()
    offset = 1 if form == "gptq" else 0
    expected = (numbers - zeros[of_input] - offset) * scales[of_input].float()
    check(
        GPTQ | {"checkpoint_format": form},
        expected.t(),
        qweight=packed(numbers.t()).t().contiguous(),
        qzeros=packed(zeros),
        scales=scales,
        **parts,
    )


def test_awq() -> None:
    numbers = nibbles(NUM_IN, NUM_OUT)
    zeros = nibbles(NUM_GROUPS, NUM_OUT)
    scales = floats(NUM_GROUPS, NUM_OUT).half()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    of_input = torch.arange(NUM_IN) // GROUP
    check(
        AWQ,
        ((numbers - zeros[of_input]) * scales[of_input].float()).t(),
        qweight=packed(numbers, order),
        qzeros=packed(zeros, order),
        scales=scales,
    )


@pytest.mark.parametrize(
    ("quantization", "part", "value"),
    [
        (INT4, "weight_shape", torch.tensor([NUM_OUT, NUM_IN + 8])),
        (INT4, "weight_g_idx", torch.full((NUM_IN,), NUM_GROUPS).int()),
        (GPTQ, "g_idx", torch.full((NUM_IN,), -1).int()),
        (GPTQ, "g_idx", torch.full((NUM_IN,), NUM_GROUPS).int()),
        (GPTQ_8, "qzeros", packed(torch.full((NUM_GROUPS, NUM_OUT), 126), BYTES)),
    ],
)
def test_small_parts_that_do_not_fit_are_refused_before_any_matrix_is_read(
    quantization: dict[str, Any], part: str, value: torch.Tensor
) -> None:
    word = 32 // quantization.get("bits", 4)
    parts = {
        "weight_packed": torch.empty(NUM_OUT, NUM_IN // 8, dtype=torch.int32),
        "weight_shape": torch.tensor([NUM_OUT, NUM_IN]),
    }
    if quantization is not INT4:
        zeros = packed(torch.full((NUM_GROUPS, NUM_OUT), 127 if word == 4 else 7), ORDERS[word])
        parts = {
            "qweight": torch.empty(NUM_IN // word, NUM_OUT, dtype=torch.int32),
            "qzeros": zeros,
        }
    found = read_quantization({"quantization_config": quantization})
    assert found is not None
    stored = {f"x.{name}": tensor for name, tensor in parts.items()}
    files = dict.fromkeys(stored, Path("a.safetensors"))
    assert join_parts(stored, found, files).keys() == {"x.weight"}
    with pytest.raises(
        UnsupportedModel, match=rf"a\.safetensors: the tensor x\.{part} does not fit the matrix x"
    ):
        join_parts(stored | {f"x.{part}": value}, found, files)


@pytest.mark.parametrize(
    ("quantization", "flag"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({}, ""),
        ([1], "it must be an object"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (MODEL_OPT | {"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
        (BLOCK_FP8 | {"weight_block_size": [64, 64]}, "weight_block_size"),
        (INT8 | {"format": "marlin-24"}, "format is 'marlin-24'"),
        (INT8 | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format"),
        (
            INT8 | {"config_groups": {}},
            "config_groups is {}; config_groups must have at least one group",
        ),
        (INT8 | {"config_groups": {"a": 1}}, "config_groups.a is 1; it must be an object"),
        (INT8 | {"format": "mixed-precision"}, "config_groups.group_0.format is None"),
        (
            targets(None),
            "config_groups.group_0.targets is None; targets must be a list of module names",
        ),
        (targets([]), r"group_0.targets is \[\]; targets must be a list of module names"),
        (targets(["Linear", 3]), "group_0.targets is .*; targets must be a list of module names"),
        (
            targets(["re:("]),
            r"a target is 're:\('; the pattern is not a valid regular expression: missing \)",
        ),
        (targets(["re:(a+)+b"]), "a target is .*; a pattern must not repeat a group"),
        (targets(["re:" + 7 * ".*"]), "a target is .*at most six repetitions"),
        (INT4 | compressed(num_bits=3, type="int", strategy="group"), "weights.num_bits is 3"),
        (
            INT4 | compressed(num_bits=8, type="int", symmetric=False, strategy="group"),
            "group_0.weights.symmetric is False",
        ),
        (GPTQ | {"bits": 3}, "bits is 3; supported are 4, 8"),
        (GPTQ | {"bits": 8, "sym": False}, "sym is False"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"group_size": 48}, "group_size is 48"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (AWQ | {"bits": True}, "bits is True"),
    ],
)
def test_what_is_unknown_is_refused_by_the_name_of_its_flag(quantization: Any, flag: str) -> None:
    if not flag:
        assert read_quantization({"quantization_config": quantization}) is None
        return
    with pytest.raises(UnsupportedModel, match=rf"quantization_config.*{flag}"):
        read_quantization({"quantization_config": quantization})


@pytest.mark.parametrize(
    ("scheme", "has_scales"),
    [
        ({"num_bits": 8, "type": "float"}, True),
        (STATIC_KV, True),
        (STATIC_KV | {"dynamic": True}, False),
        ({}, False),
        (None, False),
        (STATIC_KV | {"type": "int"}, r"kv_cache_scheme\.type is 'int'; supported are float"),
        (STATIC_KV | {"num_bits": 4}, r"kv_cache_scheme\.num_bits is 4"),
        (STATIC_KV | {"strategy": "attn_head"}, r"kv_cache_scheme\.strategy is 'attn_head'"),
        (STATIC_KV | {"symmetric": False}, r"kv_cache_scheme\.symmetric is False"),
        ("fp8", "kv_cache_scheme is 'fp8'; it must be an object"),
    ],
)
@pytest.mark.parametrize("quantization", [FP8, INT8, MODEL_OPT])
def test_schemes_of_kv(quantization: dict[str, Any], scheme: Any, has_scales: bool | str) -> None:
    config = {"quantization_config": quantization | {"kv_cache_scheme": scheme}}
    found = read_quantization(config)
    assert found is not None
    assert found.of("x") == scheme_of(quantization)
    if isinstance(has_scales, bool):
        assert has_kv_scales(config) == has_scales
        return
    with pytest.raises(UnsupportedModel, match=has_scales):
        has_kv_scales(config)


def test_kv_alone_may_be_quantized() -> None:
    config = {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC_KV}
    assert read_quantization({"quantization_config": config | {"config_groups": {}}}) is None


def test_a_checkpoint_is_loaded_as_the_numbers_that_it_stands_for(tmp_path: Path) -> None:
    """A tiny model whose matrices are int8: its own numbers, rounded."""
    folder, _ = make_tiny_model("llama", tmp_path)
    file = folder.path / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        stored[name] = rounded[name] = tensor.clone()
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            stored[name] = (tensor / scale).round().to(torch.int8)
            stored[name.removesuffix("weight") + "weight_scale"] = scale
            rounded[name] = stored[name].float() * scale
    config_file = folder.path / "config.json"
    config = json.loads(config_file.read_text())
    loaded = []
    for quantization, tensors in ((INT8, stored), (None, rounded)):
        save_file(tensors, file, metadata={"format": "pt"})
        config_file.write_text(json.dumps(config | {"quantization_config": quantization}))
        found = read_folder(folder.path)
        weights = load_weights(
            found.weight_files, found.config, dtype=torch.float32, device=torch.device("cpu")
        )
        layer = weights.layers[1]
        assert isinstance(layer.mlp, Mlp)
        loaded.append([torch.cat([part.weight for part in layer.qkv]), layer.mlp.down.weight])
    for one, other in zip(*loaded, strict=True):
        assert torch.equal(one, other)


def test_deepseek_in_blocks_of_fp8(tmp_path: Path) -> None:
    """All matrices of its layers but routers, as its authors publish them."""
    folder, _ = make_tiny_model("deepseek-v3", tmp_path)
    file = folder.path / "model.safetensors"
    config_file = folder.path / "config.json"
    stored: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        stored[name] = rounded[name] = tensor.clone()
        if name.endswith(("_proj.weight", "_with_mqa.weight")):
            num_out, num_in = tensor.shape
            scale = floats(-(-num_out // 128), -(-num_in // 128))
            wide = scale.repeat_interleave(128, 0)[:num_out].repeat_interleave(128, 1)[:, :num_in]
            stored[name] = (tensor / wide).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            rounded[name] = stored[name].float() * wide
    config = json.loads(config_file.read_text())
    loaded = []
    for quantization, tensors in ((BLOCK_FP8, stored), (None, rounded)):
        save_file(tensors, file, metadata={"format": "pt"})
        config_file.write_text(json.dumps(config | {"quantization_config": quantization}))
        found = read_folder(folder.path)
        layer = load_weights(
            found.weight_files, found.config, dtype=torch.float32, device=torch.device("cpu")
        ).layers[1]
        assert isinstance(layer.mlp, ExpertWeights)
        assert layer.latent is not None
        assert layer.latent.q_out is not None
        assert layer.mlp.shared is not None
        loaded.append(
            [
                # Matrices that are computed from others may be joined.
                torch.cat([part.weight for part in layer.qkv]),
                layer.attention_out.weight,
                layer.latent.keys,
                layer.latent.values,
                layer.latent.q_out,
                layer.mlp.shared.down.weight,
                layer.mlp.mlps[11].down.weight,
            ]
        )
    for one, other in zip(*loaded, strict=True):
        assert torch.equal(one, other)
