"""Each kind of layer on the Triton kernels, beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import StepBatch
from tests.step_batches import place
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

PROMPTS = [
    torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (20, 2)
]
WINDOW = {"sliding_window": 8}  # shorter than the longer prompt
SMALL_STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mlp_only_layers": [0],
}
# By family: the kinds of layers that nothing above it has.
KINDS: dict[str, dict[str, Any]] = {
    "gpt-oss": WINDOW,  # full and window, sinks, YaRN, biased experts, clamped gates
    "deepseek-v2": {},  # latents, a dense layer, experts beside a shared MLP
    "deepseek-v3": {},  # latents of queries, experts in groups with a correction
    "gemma2": WINDOW,  # caps, norms around, GELU
    "gemma3": WINDOW,  # norms of heads, ropes by layer, linear rope
    "granite": {"mlp_bias": True},  # multipliers, biases
    "olmo2": {},  # norms after, norms over all heads
    "smollm3": {},  # no rope
    "phi3-longrope": {"original_max_position_embeddings": 512},  # longrope, partial rope, fused
    "llama-llama3-tied": {},  # llama3's rope
    "glm4": {},  # pairs of neighbours rotated in a part of each head
    "ministral3": {"max_position_embeddings": 64},  # queries scaled by position
    "ernie4.5-moe": {},  # softmaxes with a correction
    "qwen3-next": SMALL_STATES,  # Gated DeltaNet, gates of attention and of shared MLPs
    # short convolutions with biases
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    # Mamba 2 with a norm, experts beside a shared MLP
    "granite4": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    # attention beside Mamba 2 without a norm, factors on products
    "falcon-h1": {"num_hidden_layers": 1},
    # layers of one part, MLPs and experts without gates
    "nemotron-h": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]},
    # an indexer, whose choice of 6 keys the next layer uses
    "glm5": {
        "num_hidden_layers": 2,
        "indexer_types": ["full", "shared"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_topk": 6,
    },
    # an indexer for each KV head, which chooses 2 blocks of 4 keys
    "minimax-m3": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
}
# By family: settings of the checkpoints in the long form.
LONG: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": {"index_topk": 6},  # fewer than a prompt has
    "lfm3": WINDOW,
}
OTHERS = (
    *("granite4-dense", "falcon-h1-norm", "lfm2-moe", "olmo-hybrid", "olmo-hybrid-rope"),
    *LONG,
    *("deepseek-v2-groups", "deepseek-v3-halves", "mixtral", "qwen3-moe", "mistral-window"),
    *("olmo3", "glm", "glm4-moe", "glm4-moe-lite", "seed-oss", "ernie4.5", "hy-v3"),
    *("minimax-m2", "exaone4", "mistral4", "qwen3.5", "qwen3.5-moe"),
)


@pytest.mark.parametrize(
    "family", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_logits_and_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder, reference = make_tiny_model(family, tmp_path, **(KINDS | LONG).get(family, {}))
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 8, "kernels": "triton"}
    settings["max_tokens_per_step"] = 16  # a graph of chunks has as many rows, with padding
    runner = ModelRunner(folder, EngineConfig(model="", max_num_seqs=2, **settings))
    with torch.no_grad():
        expected = [
            reference(torch.tensor([prompt], device=reference.device)).logits[0]
            for prompt in PROMPTS
        ]
    sequences = place(runner, PROMPTS)
    # Chunks, a chunk beside a single token, single tokens, and a chunk after a prefix.
    for counts in ((11, 0), (5, 1), (1, 1), (3, 0)):
        going = [i for i in range(2) if counts[i]]
        logits = runner.forward(StepBatch([sequences[i].take(counts[i]) for i in going])).cpu()
        wanted = torch.stack([expected[i][sequences[i].done - 1] for i in going])
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
