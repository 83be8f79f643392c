"""Computed sizes equal what a real engine allocates, to the byte, and the documents' figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.memory import worker_need
from tandem.errors import ConfigError, Incompatible
from tandem.models.config.model import ModelConfig
from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import CACHE_DIR_VARIABLE
from tandem.models.shape import num_parameters
from tandem.ops.kv_size.sizes import (
    KvSize,
    device_fit,
    kv_dtypes,
    kv_head_variants,
    kv_size,
    rank_layout,
)
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model

GIB = 1 << 30
LLAMA_3_8B = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)
# What its config.json says of attention.
DEEPSEEK_V3 = ModelConfig.from_hf(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163840,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_nextn_predict_layers": 1,
    }
)
NUM_BLOCKS = 7


def size(model: ModelConfig, dtype: str = "bfloat16", **more: int) -> KvSize:
    asked = {"block_size": 16, "tensor_parallel": 1, "context": 8192, "batch": 1}
    return kv_size(model, dtype, **(asked | more))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], ModelFolder]:
    """Makes a tiny model of a family with so many KV heads, each once."""

    @cache
    def make(family: str, kv_heads: int) -> ModelFolder:
        path = tmp_path_factory.mktemp("model")
        return make_tiny_model(family, path, num_key_value_heads=kv_heads)[0]

    return make


def engine_of(folder: Any, **settings: Any) -> tuple[Engine, ModelRunner]:
    return make_model_engine(folder, **{"dtype": "float32", "kernels": "torch"} | settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tensor_parallel", [1, 6])
def test_an_engine_of_latent_attention_allocates_what_was_computed(
    tmp_path: Path, tensor_parallel: int, dtype: str
) -> None:
    """Each rank has the whole of it."""
    folder, _ = make_tiny_model("deepseek-v3", tmp_path)
    computed = size(
        folder.config,
        dtype,
        block_size=12,
        tensor_parallel=tensor_parallel,
        context=NUM_BLOCKS * 12,
    )
    engine, runner = engine_of(folder, kv_dtype=dtype, block_size=12, num_blocks=NUM_BLOCKS)
    assert computed.sequence_bytes == engine.layout.pool_bytes == runner.kv.nbytes
    assert computed.token_bytes == 3 * (40 + 8) * runner.pools[0].dtype.itemsize


def test_an_engine_of_sparse_attention_allocates_what_was_computed(tmp_path: Path) -> None:
    """Two of four layers have indexers, whose keys of 20 numbers take one part of 48 numbers."""
    folder, _ = make_tiny_model("glm5", tmp_path)
    computed = size(folder.config, "float32", block_size=12, context=NUM_BLOCKS * 12)
    engine, runner = engine_of(folder, block_size=12, num_blocks=NUM_BLOCKS)
    assert computed.sequence_bytes == engine.layout.pool_bytes == runner.kv.nbytes
    assert computed.token_bytes == (4 + 1) * (40 + 8) * 4
    assert kv_dtypes(folder.config) == ["bfloat16", "float16", "float32"]
    options = EngineConfig(model="", dtype="float32", block_size=12, num_blocks=NUM_BLOCKS)
    assert worker_need(options, folder, kernels="torch").pool_bytes == engine.layout.pool_bytes


@pytest.mark.parametrize("block_size", [1, 12, 16, 64])
@pytest.mark.parametrize("computed_dtype", ["float32", "bfloat16"])
def test_an_engine_of_int8_latents_allocates_what_was_computed(
    tmp_path: Path, computed_dtype: Any, block_size: int
) -> None:
    sizes = {"kv_lora_rank": 48, "qk_rope_head_dim": 16}
    folder, _ = make_tiny_model("deepseek-v3", tmp_path, **sizes)
    computed = kv_size(
        folder.config,
        "int8",
        block_size=block_size,
        tensor_parallel=6,
        context=NUM_BLOCKS * block_size,
        batch=1,
        computed_dtype=computed_dtype,
    )
    settings = {"kv_dtype": "int8", "block_size": block_size, "num_blocks": NUM_BLOCKS}
    config = EngineConfig(model="", device="cpu", dtype=computed_dtype, kernels="torch", **settings)
    engine, runner = engine_of(folder, dtype=computed_dtype, **settings)
    assert computed.sequence_bytes == engine.layout.pool_bytes == runner.kv.nbytes
    key_bytes = 16 * (2 if computed_dtype == "bfloat16" else 4)
    part_bytes = -(-block_size * (48 + key_bytes + 2) // 64) * 64
    assert computed.block_bytes == 3 * part_bytes
    assert worker_need(config, folder, dtype=computed_dtype).pool_bytes == runner.kv.nbytes


@pytest.mark.parametrize("block_size", [1, 12, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8_e4m3", "k8v4"])
@pytest.mark.parametrize(
    ("family", "kv_heads", "tensor_parallel"),
    [
        ("llama", 6, 1),
        ("llama", 6, 2),
        ("llama", 6, 3),
        ("llama", 6, 6),
        ("llama", 2, 1),
        ("llama", 2, 2),
        ("llama-one-kv-head", 1, 1),
        ("llama-one-kv-head", 1, 4),
        ("llama-small-heads", 3, 3),
        ("mistral-wide-heads", 2, 1),
        ("qwen2-yarn", 2, 1),
        ("qwen3", 6, 2),
    ],
)
def test_an_engine_allocates_what_was_computed(
    tiny: Callable[[str, int], ModelFolder],
    family: str,
    kv_heads: int,
    tensor_parallel: int,
    dtype: str,
    block_size: int,
) -> None:
    """An engine has one rank; that of a rank's heads is an engine of a model with these heads."""
    context = NUM_BLOCKS * block_size - block_size // 2
    computed = size(
        tiny(family, kv_heads).config,
        dtype,
        block_size=block_size,
        tensor_parallel=tensor_parallel,
        context=context,
    )
    of_rank = max(1, kv_heads // tensor_parallel)
    assert computed.heads_per_rank == of_rank
    engine, runner = engine_of(
        tiny(family, of_rank), kv_dtype=dtype, block_size=block_size, num_blocks=NUM_BLOCKS
    )
    assert computed.sequence_blocks == NUM_BLOCKS
    assert computed.sequence_bytes == engine.layout.pool_bytes == runner.kv.nbytes
    assert computed.block_bytes == engine.layout.block_bytes == runner.pools[0].memory[0].nbytes
    assert computed.token_bytes * block_size == engine.layout.block_bytes


def test_an_engine_allocates_what_was_computed_for_int4(
    tiny: Callable[[str, int], ModelFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    folder = tiny("llama", 2)
    computed = size(folder.config, "int4", block_size=12, context=NUM_BLOCKS * 12)
    engine, runner = engine_of(folder, kv_dtype="int4", block_size=12, num_blocks=NUM_BLOCKS)
    assert computed.sequence_bytes == engine.layout.pool_bytes == runner.kv.nbytes
    assert computed.block_bytes == engine.layout.block_bytes


def test_a_dtype_that_no_engine_has_yet_is_what_its_tensor_takes() -> None:
    layout = rank_layout(LLAMA_3_8B, 3, block_size=16, dtype="float16", tensor_parallel=1)
    assert layout.pool_bytes == torch.empty(3, 32, 8, 2, 16, 128, dtype=torch.float16).nbytes


def test_llama_3_8b_in_bf16_has_the_documents_figures() -> None:
    one = size(LLAMA_3_8B, batch=64)
    assert one.token_bytes == 131_072
    assert one.sequence_bytes == GIB
    assert one.batch_bytes == 64 * GIB


def test_mha_gqa_and_mqa_have_the_documents_figures() -> None:
    sizes = [size(shape, batch=16) for shape in kv_head_variants(LLAMA_3_8B)]
    told = {s.attention: (s.kv_heads, s.batch_bytes) for s in sizes}
    assert told == {"MHA": (32, 64 * GIB), "GQA": (8, 16 * GIB), "MQA": (1, 2 * GIB)}


def test_deepseek_v3_has_576_numbers_a_token_and_layer() -> None:
    """Its authors' figure of KV in bfloat16 is 70.272 kB (arXiv:2505.09343, table 1)."""
    one = size(DEEPSEEK_V3)
    assert (one.attention, one.token_bytes) == ("MLA", 70_272)
    assert size(DEEPSEEK_V3, tensor_parallel=8).token_bytes == 70_272
    assert num_parameters(DEEPSEEK_V3) == 671_026_419_200
    assert kv_head_variants(DEEPSEEK_V3) == [DEEPSEEK_V3]
    assert kv_dtypes(DEEPSEEK_V3) == ["bfloat16", "float16", "float32", "int8"]
    with pytest.raises(ConfigError, match="fp8_e4m3 is not supported with latent attention"):
        size(DEEPSEEK_V3, "fp8_e4m3")


def test_int8_of_deepseek_v3_has_a_scale_and_64_numbers_as_they_are() -> None:
    part_bytes = 16 * (512 + 64 * 2 + 2) + 32  # padding
    assert size(DEEPSEEK_V3, "int8").block_bytes == 61 * part_bytes
    assert size(DEEPSEEK_V3, "int8", tensor_parallel=8).block_bytes == 61 * part_bytes
    assert DEEPSEEK_V3.latent is not None
    odd = replace(DEEPSEEK_V3, latent=replace(DEEPSEEK_V3.latent, kv_rank=40))
    with pytest.raises(ConfigError, match="kv_lora_rank is a multiple of 16; it is 40"):
        size(odd, "int8")
    assert "int8" not in kv_dtypes(odd)


def test_a_model_without_grouped_heads_has_two_kinds_of_attention() -> None:
    shape = replace(LLAMA_3_8B, num_kv_heads=32)
    assert [size(s).attention for s in kv_head_variants(shape)] == ["MHA", "MQA"]
    shape = replace(LLAMA_3_8B, num_kv_heads=1)
    assert [size(s).attention for s in kv_head_variants(shape)] == ["MHA", "MQA"]


def test_a_sequence_takes_whole_blocks() -> None:
    assert size(LLAMA_3_8B, context=17).sequence_bytes == 2 * size(LLAMA_3_8B).block_bytes


def test_ranks_that_divide_no_heads_are_refused() -> None:
    with pytest.raises(Incompatible, match="tensor_parallel 3 does not divide 8 KV heads"):
        size(LLAMA_3_8B, tensor_parallel=3)


def test_an_engine_makes_the_same_blocks_of_the_free_memory(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("llama", tmp_path)
    computed = size(folder.config, "float32", context=100)
    fit = device_fit(
        folder.config,
        computed,
        block_size=16,
        memory_bytes=5_000_000,
        weight_bytes=4,
        reserve_bytes=1_000_000,
    )
    assert fit.weights_bytes == 4 * num_parameters(folder.config)
    assert fit.free_bytes == 4_000_000 - fit.weights_bytes
    engine, _ = engine_of(folder, kv_dtype="float32", kv_bytes_max=fit.free_bytes)
    assert fit.num_blocks == engine.layout.num_blocks
    assert fit.num_tokens == 16 * fit.num_blocks
    assert fit.num_sequences == fit.num_blocks // 7


@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "qwen2-some-windows"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pools_of_kv_groups_are_divided_as_an_engine_does(
    family: str, dtype: str, tmp_path: Path
) -> None:
    folder, _ = make_tiny_model(family, tmp_path)
    computed = size(folder.config, dtype, context=1000)
    layers = {len(group.layers): group for group in engine_of(folder)[0].layout.groups}
    by_hand = {group.window: -(-1000 // 16) for group in layers.values()}
    for window in by_hand:
        if window is not None:
            by_hand[window] = -(-(window - 1) // 16) + 1
    assert sorted(computed.group_blocks) == sorted(by_hand.values())
    fit = device_fit(
        folder.config,
        computed,
        block_size=16,
        memory_bytes=40_000_000,
        weight_bytes=4,
        reserve_bytes=1_000_000,
    )
    engine, runner = engine_of(folder, kv_dtype=dtype, kv_bytes_max=fit.free_bytes)
    assert fit.group_blocks == tuple(engine.layout.sizes)
    assert engine.layout.pool_bytes == runner.kv.nbytes
    assert 0 <= fit.free_bytes - engine.layout.pool_bytes < engine.layout.block_bytes
    if len(fit.group_blocks) > 1:
        equal = fit.free_bytes // engine.layout.block_bytes
        assert fit.group_blocks[0] > equal >= fit.group_blocks[1]


def test_weights_that_do_not_fit_leave_no_block() -> None:
    fit = device_fit(
        LLAMA_3_8B,
        size(LLAMA_3_8B),
        block_size=16,
        memory_bytes=8 * GIB,
        weight_bytes=2,
        reserve_bytes=0,
    )
    assert (fit.free_bytes, fit.num_blocks, fit.num_sequences) == (0, 0, 0)
