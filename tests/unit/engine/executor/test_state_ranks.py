"""Ranks of torch kernels that share the layers of hybrids and of other unusual models. Each rank
has the heads of states, and of keys and values, in pools of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.scheduler.batch import StepBatch
from tandem.models.folder import ModelFolder
from tests.rank_threads import RankThreads
from tests.step_batches import Progress
from tests.tiny_models import FAMILIES, make_tiny_model

PROMPTS = [[(7 * i + 3 * size) % 200 for i in range(size)] for size in (81, 17)]
STEPS = ((3, 17), (1, 0), (70, 0), (1, 0), (1, 0))  # number of tokens of each prompt
_BLOCKS_EACH = 11
# Ranks share the heads of q and k, and the groups of norms.
FEW_GROUPS = {"mamba_n_groups": 1}
LONG = pytest.mark.slow
# Sizes of families without states, and of Kimi Linear.
OTHERS: dict[str, dict[str, Any]] = {
    "kimi-linear": {"linear_num_heads": 4},
    "glm5": {},
    "minimax-m3": {"index_n_heads": 4},
    "deepseek-v4": {"num_key_value_heads": 1, "o_groups": 4},
    "gemma3n": {},
    "gemma4-keys": {},
    "gemma4-moe": {},
    "mimo-v2": {},
}


def tiny(family: str, path: Path, **more: Any) -> ModelFolder:
    """A model with 8 query heads, 4 KV heads, and heads of states that 4 ranks can share."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}
    if family.startswith(("qwen3", "olmo")):
        sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    if family == "olmo-hybrid-rope":  # transformers stores equal parts of q, k and v
        sizes["linear_num_value_heads"] = 4
    if family.startswith("lfm"):
        sizes["hidden_size"] = 256
    if family.startswith(("glm5", "deepseek", "kimi")):
        sizes["num_key_value_heads"] = 8
    sizes |= OTHERS.get(family, {})
    return make_tiny_model(family, path, **sizes | more)[0]


def outputs(folder: ModelFolder, num_ranks: int, numerics: str) -> list[torch.Tensor]:
    """The logits of each step, and then the bytes of all states."""
    ranks = RankThreads(folder, num_ranks, numerics=numerics, num_blocks=2 * _BLOCKS_EACH)
    sequences = []
    for i, prompt in enumerate(PROMPTS):
        table = list(range(_BLOCKS_EACH * i, _BLOCKS_EACH * (i + 1)))
        sequences.append(Progress(prompt, table, other_tables=[table] * (len(ranks.pools[0]) - 1)))
    found = [
        ranks.forward(
            StepBatch([each.take(num) for each, num in zip(sequences, step, strict=True) if num])
        )
        for step in STEPS
    ]
    return [*found, *(states.view(torch.float32) for states in ranks.states())]


SHARED = [
    *(
        pytest.param(family, {}, 4, marks=() if family in ("glm5", "gemma3n") else LONG)
        for family in OTHERS
    ),
    pytest.param("qwen3-next", {}, 4),
    pytest.param("granite4", FEW_GROUPS, 2),
    pytest.param("nemotron-h", {}, 4, marks=LONG),  # 42 channels of B, of which the last rank has 9
    pytest.param("lfm2", {}, 4),
    pytest.param("falcon-h1-norm", {}, 4),
    *(
        pytest.param(family, more, num_ranks, marks=LONG)
        for family in FAMILIES
        for num_ranks in (2, 4)
        for more in ({}, FEW_GROUPS)
        if family.startswith(("granite4", "falcon-h1", "qwen3-next", "qwen3.5", "olmo-h", "lfm2"))
        and not (more and family.startswith(("qwen", "olmo", "lfm")))
    ),
]


@pytest.mark.parametrize(("family", "more", "num_ranks"), SHARED)
def test_invariant_logits_and_states_do_not_depend_on_the_number_of_ranks(
    family: str, more: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    folder = tiny(family, tmp_path, **more)
    alone, several = (outputs(folder, num, "invariant") for num in (1, num_ranks))
    assert len(alone) == len(STEPS) + folder.config.has_states
    assert all(map(torch.equal, alone, several))


@pytest.mark.parametrize(("family", "more", "num_ranks"), SHARED)
def test_fast_ranks_compute_nearly_the_same(
    family: str, more: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    """The ranks' sums are added in another order than one process adds all."""
    folder = tiny(family, tmp_path, **more)
    alone, several = (outputs(folder, num, "fast") for num in (1, num_ranks))
    for one, other in zip(alone, several, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
