"""Sparse and compressed attention, and several residual streams by C++ on every instruction set,
beside torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.cache.layout.kv_groups import layer_groups, model_layout
from tandem.engine.cache.layout.row_layout import RowLayout
from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.torch.steps import TorchSteps
from tandem.engine.executor.weights.load import load_weights
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.config.model import ModelConfig
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder
from tandem_kernels.row_pool import RowPool
from tandem_kernels.state_pool import Pool
from tests.kv_pools import empty_pool
from tests.tiny_models import make_tiny_model
from tests.unit.engine.executor.native.test_decoder import INSTRUCTIONS

BLOCK_SIZE, NUM_BLOCKS = 12, 120
PROMPTS = [
    torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (150, 40, 330)
]
# For each prompt, the numbers of its tokens in each step.
CUTS = ([(150, 40, 330)], [(1, 3, 7)] * 9 + [(141, 13, 267)], [(40, 1, 300), (1, 1, 1)])
TIES = {"index_n_heads": 1, "index_topk": 30}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": ("deepseek-v3.2", {"num_experts_per_tok": 12, "n_group": 1, "topk_group": 1}),
    "shared": ("glm5", {"num_experts_per_tok": 12}),
    # With one head, many scores are 0.
    "ties": ("glm5", {"num_experts_per_tok": 12} | TIES),
    "blocks": ("minimax-m3", {"num_experts_per_tok": 12}),
    "long-blocks": (
        "minimax-m3",
        {"num_experts_per_tok": 12, "index_block_size": 50, "index_local_blocks": 0},
    ),
    "copies": ("gemma3n", {}),
    "compressed": (
        "deepseek-v4",
        {
            "num_experts_per_tok": 12,
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 24,
            },
        },
    ),
}
# Entries of 2 tokens, of which the long prompt has more than a piece of attention.
MANY_ENTRIES = {
    "num_experts_per_tok": 12,
    "max_position_embeddings": 2048,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 2},
}
LONG_PROMPT = torch.randint(0, 203, (1300,), generator=torch.Generator().manual_seed(1300)).tolist()


def pools_of(folder: ModelFolder, dtype: str) -> list[Pool]:
    num_blocks = [NUM_BLOCKS] * len(layer_groups(folder.config))
    layout = model_layout(
        folder.config, num_blocks, block_size=BLOCK_SIZE, dtype=dtype, computed_dtype=dtype
    )
    return [
        RowPool(torch.zeros(NUM_BLOCKS, group.layout.block_bytes, dtype=torch.uint8), group.layout)
        if isinstance(group.layout, RowLayout)
        else empty_pool(group.layout)
        for group in layout.groups
    ]


def run(
    steps: NativeDecoder | TorchSteps,
    folder: ModelFolder,
    dtype: str,
    cut: Sequence[Sequence[int]],
    prompts: Sequence[list[int]] = PROMPTS,
) -> torch.Tensor:
    """Computes all prompts in the steps of `cut`, and the rest of them in a last step. Returns the
    logits of their last tokens."""
    pools = pools_of(folder, dtype)
    tables = [list(range(which, NUM_BLOCKS, len(prompts)))[::-1] for which in range(len(prompts))]
    done = [0] * len(prompts)
    rest = [len(prompt) - sum(step[which] for step in cut) for which, prompt in enumerate(prompts)]
    last: dict[int, torch.Tensor] = {}
    for step in (*cut, rest):
        slices, of_slices = [], []
        for which, (prompt, num) in enumerate(zip(prompts, step, strict=True)):
            if not num:
                continue
            token_ids = prompt[done[which] : done[which] + num]
            done[which] += num
            others = [tables[which]] * (len(pools) - 1)
            slices.append(
                SequenceSlice(token_ids, done[which], tables[which], True, other_tables=others)
            )
            of_slices.append(which)
        if not slices:
            continue
        with torch.inference_mode():
            logits = steps.forward(StepBatch(slices), pools).clone()
        last |= dict(zip(of_slices, logits, strict=True))
    return torch.stack([last[which] for which in range(len(prompts))])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_every_instruction_set_computes_what_torch_does_however_prompts_are_cut(
    instructions: str, name: str, dtype: str, tmp_path: Path
) -> None:
    """Torch computes in float32, with the same weights and the dtype of the KV. If the kernels
    round activations to bfloat16 (AMX, AVX512_BF16), indexers choose other blocks where scores are
    close, so only prompts of which all blocks are chosen are compared with torch."""
    family, more = FAMILIES[name]
    made, model = make_tiny_model(family, tmp_path, **more)
    if dtype == "bfloat16":
        model.to(torch.bfloat16).save_pretrained(tmp_path)
    folder = read_folder(tmp_path)
    assert folder.config.layers == made.config.layers
    weights, wide = (
        load_weights(folder.weight_files, folder.config, dtype=each, device=torch.device("cpu"))
        for each in (getattr(torch, dtype), torch.float32)
    )
    expected = run(TorchSteps(folder.config, wide, "fast"), folder, dtype, CUTS[0])
    seen = []
    for cut, num_threads in zip(CUTS, (1, 3, 2), strict=True):
        decoder = NativeDecoder(
            folder.config, weights, num_threads=num_threads, instructions=instructions
        )
        seen.append(run(decoder, folder, dtype, cut))
    for logits in seen[1:]:
        assert torch.equal(logits, seen[0])
    if dtype == "float32":
        torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-4)
        return
    rounds = decoder.multiplies_bf16
    most = most_chosen(folder.config) if rounds else len(PROMPTS[2])
    for prompt, logits, others in zip(PROMPTS, seen[0], expected, strict=True):
        if len(prompt) <= most:
            assert (logits - others).norm() <= (0.2 if rounds else 0.01) * others.norm()


def most_chosen(config: ModelConfig) -> int:
    """Returns the largest number of tokens for which indexers choose all blocks or entries."""
    most = len(PROMPTS[2])
    for spec in config.layers:
        if spec.indexer is not None and spec.indexer.block_size is not None:
            most = min(most, spec.indexer.top_k * spec.indexer.block_size)
        if spec.compressor is not None and spec.compressor.indexer is not None:
            most = min(most, spec.compressor.indexer.top_k * spec.compressor.rate)
    return most


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_entries_in_several_pieces_of_attention(instructions: str, tmp_path: Path) -> None:
    folder, _ = make_tiny_model("deepseek-v4", tmp_path, **MANY_ENTRIES)
    weights = load_weights(
        folder.weight_files, folder.config, dtype=torch.float32, device=torch.device("cpu")
    )
    prompts = [LONG_PROMPT]
    expected = run(TorchSteps(folder.config, weights, "fast"), folder, "float32", [], prompts)
    for cut, num_threads in (([], 1), ([(700,), (599,)], 3)):
        decoder = NativeDecoder(
            folder.config, weights, num_threads=num_threads, instructions=instructions
        )
        logits = run(decoder, folder, "float32", cut, prompts)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        expected = logits
    assert torch.equal(logits, run(decoder, folder, "float32", [(1299,)], prompts))
