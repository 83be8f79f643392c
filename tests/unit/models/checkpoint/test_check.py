"""Checkpoints are checked by their headers: each of our tiny ones passes, and whatever is missing,
surplus, or of another shape or type in one is named, with what it must be."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.checkpoint.check import check_weights
from tandem.models.checkpoint.headers import TensorHeader, read_header
from tandem.models.checkpoint.quantized.forms import forms_of_parts
from tandem.models.config.quantization import read_quantization
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder, resolve
from tests.tiny_models import FAMILIES, make_tiny_model
from tests.unit.models.checkpoint.quantized.test_tensors import (
    AWQ,
    BLOCK_FP8,
    FLOAT,
    FP8,
    GPTQ,
    GPTQ_8,
    INT4,
    INT4_ZEROS,
    INT8,
    scheme_of,
)
from tests.unit.models.gguf.test_families import file_of, make_origin

Headers = dict[str, TensorHeader]
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}


def write_headers(file: Path, headers: Headers) -> None:
    """Writes a whole safetensors file whose numbers are all 0, and take no space on the disk."""
    at = 0
    described = {}
    for name, each in headers.items():
        end = at + math.prod(each.shape) * BYTES[each.dtype]
        described[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(described).encode()
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + at)


def check(folder: ModelFolder, headers: Headers | None = None) -> None:
    if headers is not None:
        write_headers(folder.weight_files[0], headers)
    check_weights(folder.weight_files, folder.config)


def headers_of(folder: ModelFolder) -> Headers:
    return dict(read_header(folder.weight_files[0]).tensors)


def broken(headers: Headers, published: Callable[[str], str]) -> Iterator[tuple[str, Headers]]:
    """Each tensor of a checkpoint in turn: absent, longer by one, and of another type."""
    for name, each in headers.items():
        rest = {other: header for other, header in headers.items() if other != name}
        yield rf"lacks {re.escape(published(name))} of shape \[", rest
        longer = replace(each, shape=(*each.shape[:-1], sum(each.shape[-1:], 2)))
        found = rf"{re.escape(name)} has shape {re.escape(str(list(longer.shape)))}"
        yield rf"{found}; config\.json implies \[", headers | {name: longer}
        other = replace(each, dtype="I64" if each.dtype != "I64" else "F32")
        yield (
            rf"{re.escape(name)} has type {other.dtype}; config\.json impl",
            headers | {name: other},
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_of_a_family_must_be_there_and_fit(family: str, tmp_path: Path) -> None:
    folder, _ = make_tiny_model(family, tmp_path)
    check(folder)
    headers = headers_of(folder)
    # transformers writes other names for these than the published files have.
    is_renamed = family in ("minimax-m3", "deepseek-v4")
    published = folder.config.name_in_files if is_renamed else str
    for message, wrong in broken(headers, published):
        with pytest.raises(UnsupportedModel, match=message) as raised:
            check(folder, wrong)
        assert str(folder.weight_files[0]) in raised.value.message
    surplus = headers | {"model.layers.0.extra.weight": TensorHeader("F32", (3,))}
    with pytest.raises(UnsupportedModel, match=r"has model\.layers\.0\.extra\.weight, but conf"):
        check(folder, surplus)


Parts = dict[str, tuple[str, tuple[int, ...]]]
# The tensors of a matrix, as the makers' libraries write them.
QUANTIZED: dict[str, tuple[dict[str, Any], Callable[[int, int], Parts]]] = {
    "fp8": (
        FP8,
        lambda num_out, num_in: {
            "weight": ("F8_E4M3", (num_out, num_in)),
            "weight_scale": ("F32", ()),
            "input_scale": ("F32", ()),
        },
    ),
    "fp8-blocks": (
        BLOCK_FP8,
        lambda num_out, num_in: {
            "weight": ("F8_E4M3", (num_out, num_in)),
            "weight_scale_inv": ("F32", (math.ceil(num_out / 128), math.ceil(num_in / 128))),
        },
    ),
    "fp8-rows": (
        FLOAT,
        lambda num_out, num_in: {
            "weight": ("F8_E4M3", (num_out, num_in)),
            "weight_scale": ("F32", (num_out, 1)),
        },
    ),
    "int8": (
        INT8,
        lambda num_out, num_in: {
            "weight": ("I8", (num_out, num_in)),
            "weight_scale": ("F16", (num_out, 1)),
        },
    ),
    "int4": (
        INT4,
        lambda num_out, num_in: {
            "weight_packed": ("I32", (num_out, num_in // 8)),
            "weight_scale": ("F16", (num_out, num_in // 32)),
            "weight_shape": ("I64", (2,)),
        },
    ),
    "int4-zeros": (
        INT4_ZEROS,
        lambda num_out, num_in: {
            "weight_packed": ("I32", (num_out, num_in // 8)),
            "weight_zero_point": ("I32", (math.ceil(num_out / 8), num_in // 32)),
            "weight_scale": ("BF16", (num_out, num_in // 32)),
            "weight_shape": ("I64", (2,)),
            "weight_g_idx": ("I32", (num_in,)),
        },
    ),
    "gptq-8": (
        GPTQ_8,
        lambda num_out, num_in: {
            "qweight": ("I32", (num_in // 4, num_out)),
            "qzeros": ("I32", (num_in // 32, num_out // 4)),
            "scales": ("F16", (num_in // 32, num_out)),
        },
    ),
    "gptq": (
        GPTQ,
        lambda num_out, num_in: {
            "qweight": ("I32", (num_in // 8, num_out)),
            "qzeros": ("I32", (num_in // 32, num_out // 8)),
            "scales": ("F16", (num_in // 32, num_out)),
            "g_idx": ("I32", (num_in,)),
        },
    ),
    "awq": (
        AWQ,
        lambda num_out, num_in: {
            "qweight": ("I32", (num_in, num_out // 8)),
            "qzeros": ("I32", (num_in // 32, num_out // 8)),
            "scales": ("F16", (num_in // 32, num_out)),
        },
    ),
}
OPTIONAL = ("input_scale", "g_idx")


def quantized(folder: ModelFolder, name: str) -> tuple[ModelFolder, Headers]:
    """A folder whose matrices but those of tokens are quantized, and the headers of its file."""
    quantization, parts_of = QUANTIZED[name]
    headers: Headers = {}
    for tensor, each in headers_of(folder).items():
        module = tensor.removesuffix(".weight")
        if not tensor.endswith("_proj.weight"):
            headers[tensor] = each
            continue
        num_out, num_in = each.shape
        for part, (dtype, shape) in parts_of(num_out, num_in).items():
            headers[f"{module}.{part}"] = TensorHeader(dtype, shape)
    found = read_quantization({"quantization_config": quantization})
    return replace(folder, config=replace(folder.config, quantization=found)), headers


@pytest.mark.parametrize("name", QUANTIZED)
def test_each_part_of_a_quantized_matrix_must_be_there_and_fit(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4}
    folder, headers = quantized(make_tiny_model("llama", tmp_path, **sizes)[0], name)
    check(folder, headers)
    for message, wrong in broken(headers, str):
        if any(f"{part} " in message for part in map(re.escape, OPTIONAL)):
            continue
        with pytest.raises(UnsupportedModel, match=message):
            check(folder, wrong)
    check(folder, {key: each for key, each in headers.items() if not key.endswith(OPTIONAL)})


def test_what_cannot_be_quantized_so_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 300, "num_attention_heads": 4}
    plain, _ = make_tiny_model("llama", tmp_path, **sizes)
    headers_before = headers_of(plain)
    folder, headers = quantized(plain, "int4")
    with pytest.raises(UnsupportedModel, match=r"down_proj has 300 inputs; .* the group size, 32"):
        check(folder, headers)
    write_headers(plain.weight_files[0], headers_before)
    folder, headers = quantized(plain, "int8")
    with pytest.raises(UnsupportedModel, match=r"model\.norm is quantized, but only matrices"):
        check(folder, headers | {"model.norm.weight": TensorHeader("I8", (128,))})
    with pytest.raises(UnsupportedModel, match=r"x has 300 outputs; .* a multiple of 8"):
        forms_of_parts("x", (300, 128), {}, scheme_of(AWQ))


def test_the_output_of_tied_embeddings_may_be_there_again_and_must_fit(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("qwen3", tmp_path)
    headers = headers_of(folder)
    assert "lm_head.weight" not in headers
    check(folder, headers | {"lm_head.weight": headers["model.embed_tokens.weight"]})
    with pytest.raises(
        UnsupportedModel, match=r"lm_head\.weight has shape \[5, 96\]; .*\[203, 96\]"
    ):
        check(folder, headers | {"lm_head.weight": TensorHeader("F32", (5, 96))})


def test_a_tied_output_that_alone_is_quantized_is_refused(tmp_path: Path) -> None:
    folder, headers = quantized(make_tiny_model("qwen3", tmp_path)[0], "int8")
    assert folder.config.tie_word_embeddings
    check(folder, headers)
    vocab_size, hidden = headers["model.embed_tokens.weight"].shape
    output = {
        "lm_head.weight": TensorHeader("I8", (vocab_size, hidden)),
        "lm_head.weight_scale": TensorHeader("F16", (vocab_size, 1)),
    }
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight and .* different matrices"):
        check(folder, headers | output)
    embedding = {
        "model.embed_tokens.weight": TensorHeader("I8", (vocab_size, hidden)),
        "model.embed_tokens.weight_scale": TensorHeader("F16", (vocab_size, 1)),
    }
    check(folder, headers | output | embedding)


def test_layers_that_do_not_run_and_tables_that_follow_from_the_config_are_left(
    tmp_path: Path,
) -> None:
    folder, _ = make_tiny_model("deepseek-v3", tmp_path, num_nextn_predict_layers=1)
    more = {
        "model.layers.3.anything": TensorHeader("I64", (7,)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": TensorHeader("F32", (4,)),
        "model.layers.1.self_attn.k_scale": TensorHeader("F32", (1,)),
    }
    check(folder, headers_of(folder) | more)
    with pytest.raises(UnsupportedModel, match=r"has model\.layers\.4\.anything"):
        check(folder, headers_of(folder) | {"model.layers.4.anything": TensorHeader("I64", (7,))})


def test_of_several_files_the_one_with_the_tensor_is_named(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("llama", tmp_path)
    headers = headers_of(folder)
    headers["model.norm.weight"] = TensorHeader("F32", (47,))
    names = sorted(headers)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, held in shards.items():
        write_headers(tmp_path / file, {name: headers[name] for name in held})
    folder.weight_files[0].unlink()
    with pytest.raises(
        UnsupportedModel, match=r"b\.safetensors: model\.norm\.weight has shape \[47\]"
    ):
        check(read_folder(tmp_path))
    write_headers(tmp_path / "b.safetensors", {name: headers[name] for name in names[8:]})
    with pytest.raises(UnsupportedModel, match=rf"{tmp_path}: the checkpoint lacks {names[7]}"):
        check(read_folder(tmp_path))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}, "unknown type 'F7'"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "invalid shape"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"4 bytes, .*F32 and .*\[2\]"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "gap at byte 0"),
        ({"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "has 1 bytes after its last"),
        (
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "cut short: .* take 8 .* has only 4",
        ),
    ],
)
def test_a_header_that_does_not_describe_its_file(
    described: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.safetensors"
    raw = json.dumps({"x": described}).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"0123")
    with pytest.raises(ConfigError, match=rf"x\.safetensors.*{message}"):
        read_header(file)


def test_tensors_of_gguf_files_are_named_as_the_file_names_them(
    tmp_path: Path, tiny_gguf: Any
) -> None:
    for name in ("llama-dense", "olmo2", "gemma3", "phi3", "gpt-oss", "qwen3moe"):
        origin = make_origin(name, tiny_gguf.vocab_size)
        folder = resolve(str(file_of(name, origin, tmp_path / f"{name}.gguf")), cache_dir=tmp_path)
        check(folder)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"blk.1.attn_k.weight": None}, r"lacks blk\.1\.attn_k\.weight of shape \[32, 64\]"),
        ({"output_norm.weight": None}, r"lacks output_norm\.weight of shape \[64\]"),
        (
            {"blk.0.ffn_down.weight": np.zeros((64, 95), np.float32)},
            r"blk\.0\.ffn_down\.weight has shape \[64, 95\]; its header implies \[64, 96\]",
        ),
        ({"blk.1.attn_q_norm.weight": np.ones(16, np.float32)}, r"has blk\.1\.attn_q_norm\.weight"),
        ({"blk.0.ffn_norm.weight": np.ones(64, np.int32)}, "ffn_norm.weight is of type I32"),
        (
            {"blk.0.post_attention_norm.weight": np.ones(64, np.float32)},
            r"ffn_norm\.weight and blk\.0\.post_attention_norm\.weight, which are two names of",
        ),
    ],
)
def test_a_gguf_file_whose_tensors_do_not_fit(
    wrong: dict[str, Any], message: str, tmp_path: Path, tiny_gguf: Any
) -> None:
    origin = make_origin("llama-dense", tiny_gguf.vocab_size)
    tensors = tiny_gguf.tensors_of(origin) | wrong
    file = tiny_gguf.write(
        tmp_path / "tiny.gguf", {name: each for name, each in tensors.items() if each is not None}
    )
    with pytest.raises(UnsupportedModel, match=rf"tiny\.gguf: .*{message}"):
        check(resolve(str(file), cache_dir=tmp_path))
