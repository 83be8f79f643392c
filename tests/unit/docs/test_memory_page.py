"""The figures of docs/memory.md, computed by the code that sizes pools and checks memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.common.config.engine import EngineConfig
from tandem.common.dtypes import DTYPE_BYTES, KV_BITS, is_quantized
from tandem.engine.cache.layout.block_layout import BlockLayout, num_blocks_of
from tandem.engine.memory import worker_need
from tandem.models.folder import ModelFolder
from tandem.models.source import BUILT_IN, resolve
from tests.harness.chart import EXAMPLES, values_of
from tests.harness.documents import ROOT

PAGE = (ROOT / "docs" / "memory.md").read_text()
SHAPES = {  # layers, KV heads, head dimension: of each model's config.json
    "SmolLM2-135M": (30, 3, 64),
    "Qwen2.5-0.5B": (24, 2, 64),
    "Llama-3-8B": (32, 8, 128),
}
LLAMA_PARAMETERS = 8_030_261_248
LLAMA_VOCAB = 128_256
LLAMA_HIDDEN = 4096
MIB, GIB = 1 << 20, 1 << 30
ALLOWANCE_BYTES = SHARED_MEMORY_BYTES = GIB
SOAK_BLOCKS = 1500


def layout(model: str, dtype: str = "bfloat16") -> BlockLayout:
    num_layers, num_kv_heads, head_dim = SHAPES[model]
    return BlockLayout(1, num_kv_heads, num_layers, 16, head_dim, dtype)


@pytest.fixture
def llama(tmp_path: Path) -> ModelFolder:
    """A folder with the shape and the size of Llama-3-8B in bf16; its file is sparse."""
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(LLAMA_PARAMETERS * DTYPE_BYTES["bfloat16"])
    built_in = resolve(BUILT_IN)
    config = replace(
        built_in.config, torch_dtype="bfloat16", vocab_size=LLAMA_VOCAB, hidden_size=LLAMA_HIDDEN
    )
    return replace(built_in, config=config, weight_files=(weights,), num_weights=LLAMA_PARAMETERS)


@pytest.mark.parametrize("model", SHAPES)
def test_a_row_of_the_pool_table_is_right(model: str) -> None:
    block_bytes = layout(model).block_bytes
    num_blocks = num_blocks_of(EngineConfig(model=""), block_bytes)
    sizes = block_bytes // 16, block_bytes, num_blocks, num_blocks * 16
    assert f"| {model} | {' | '.join(f'{size:,}' for size in sizes)} |" in PAGE


@pytest.mark.parametrize("dtype", [dtype for dtype in KV_BITS if is_quantized(dtype)])
@pytest.mark.parametrize("model", SHAPES)
def test_a_row_of_the_table_of_quantized_kv_is_right(model: str, dtype: str) -> None:
    block_bytes = layout(model, dtype).block_bytes
    num_blocks = num_blocks_of(EngineConfig(model=""), block_bytes)
    sizes = block_bytes // 16, block_bytes, num_blocks, num_blocks * 16
    ratio = layout(model).block_bytes / block_bytes
    row = f"| {model}, {dtype} | {' | '.join(f'{size:,}' for size in sizes)} | {ratio:.2f} |"
    assert row in PAGE


def test_the_worked_example_is_right(llama: ModelFolder) -> None:
    pool_bytes = 32 * -(-1500 // 16) * layout("Llama-3-8B").block_bytes
    config = EngineConfig(model="", kv_bytes_max=pool_bytes, dtype="bfloat16")
    need = worker_need(config, llama, kernels="native")
    limit_bytes = need.pool_bytes + need.weights_bytes + ALLOWANCE_BYTES + SHARED_MEMORY_BYTES
    for number in (need.pool_bytes, need.weights_bytes, limit_bytes, LLAMA_PARAMETERS):
        assert f" {number:,}" in PAGE
    assert f"{need.option}\n" in PAGE
    assert f"{limit_bytes:,} = {limit_bytes / GIB:.1f} GiB" in PAGE
    assert f"so {-(-limit_bytes // GIB)}Gi" in PAGE
    wide = worker_need(EngineConfig(model="", dtype="float32"), llama, kernels="native")
    assert f"{wide.weights_bytes:,} bytes" in PAGE
    assert f"{LLAMA_VOCAB * EngineConfig(model='').max_num_seqs * 4 / 1e6:.0f} MB" in PAGE


def test_the_figures_of_the_gpu_are_right(llama: ModelFolder) -> None:
    (example,) = (path for path in EXAMPLES if path.name == "h100-rdma.yaml")
    pool_bytes = values_of(example)["worker"]["options"]["kvMemory"]
    config = EngineConfig(model="", kv_bytes_max=pool_bytes, dtype="bfloat16")
    need = worker_need(config, llama, kernels="triton")
    num_blocks = num_blocks_of(config, layout("Llama-3-8B").block_bytes)
    sum_bytes = need.pool_bytes + need.weights_bytes
    assert f"{num_blocks:,} blocks, {num_blocks * 16:,} tokens" in PAGE
    for number in (need.pool_bytes, need.weights_bytes, sum_bytes):
        assert f"{number:,} bytes = {number / GIB:.1f}".removesuffix(".0") in PAGE


def test_the_allowance_follows_from_the_soak() -> None:
    soak = values_of(ROOT / "benchmarks" / "results" / "soak.json")["processes"]
    resident = sum(soak[name]["pss_mib"]["last"] for name in ("decode-0", "decode-0 engine"))
    config = EngineConfig(model="", num_blocks=SOAK_BLOCKS, dtype="bfloat16")
    need = worker_need(config, resolve(BUILT_IN), kernels="torch")  # without the converted copy
    counted = (need.pool_bytes + need.weights_bytes) / MIB
    for figure in (resident, counted, resident - counted):
        assert f"{figure:,.0f} MiB" in PAGE
    assert resident - counted < ALLOWANCE_BYTES / MIB
