"""An expert that all tokens choose, and one that none choose: of every family with experts, on all
kernels, of numbers and of packed types, in steps of many rows and of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from tandem.engine.executor.runner import ModelRunner
from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import converted_folder
from tandem.models.source import read_folder
from tandem_kernels.native.library import Kind
from tests.model_engines import make_runner
from tests.step_batches import mixed_steps
from tests.tiny_models import make_tiny_model
from tests.unit.models.gguf.test_families import file_of, make_origin

PROMPTS = [
    torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 5, 33, 70)
]
STEPS = ((1,), (7, 64), (1, 7, 64))  # tokens of each prompt in a step
ALL, NONE = 1, 3
FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")
NO_WINDOW = {"sliding_window": 512}


def runner_of(folder: ModelFolder, **settings: Any) -> ModelRunner:
    settings = {"dtype": "float32", "block_size": 8, "max_model_len": 96} | settings
    return make_runner(folder, **settings)


@torch.no_grad()
def skew(model: PreTrainedModel) -> list[torch.Tensor]:
    """Lets all tokens choose one expert and none another, whose weights are far too large.

    All tokens have one large number, which only the routers of these two weigh. Returns for each
    layer with experts how many tokens chose each one, which later calls of the model count.
    """
    model.model.embed_tokens.weight[:, 0] = 60.0
    counts = []
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "experts"):
            continue
        layer.post_attention_layernorm.weight[0] = 1.0
        router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate
        router.weight[:, 0] = 0.0
        router.weight[ALL, 0] = 9.0
        router.weight[NONE, 0] = -9.0
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias[ALL] = 5.0
            router.e_score_correction_bias[NONE] = -5.0
        for parameter in layer.mlp.experts.parameters():
            parameter[NONE] *= 30
        counts.append(torch.zeros(len(router.weight), dtype=torch.int64))
        layer.mlp.experts.register_forward_pre_hook(_counting(counts[-1]), with_kwargs=True)
    return counts


def _counting(counts: torch.Tensor) -> Any:
    def count(_: object, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        chosen = next(t for t in (*args, *more.values()) if not t.is_floating_point())
        counts.add_(chosen.flatten().bincount(minlength=len(counts)))

    return count


def logits_of(model: PreTrainedModel) -> list[torch.Tensor]:
    """Returns transformers' logits of all prompts, after checking that the choices are extreme."""
    counts = skew(model)
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    assert counts
    for count in counts:
        assert count[ALL] == sum(map(len, PROMPTS))
        assert count[NONE] == 0
        assert count.sum() > count[ALL]
    return expected


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *((family, kernels) for family in FAMILIES for kernels in ("native", "torch")),
        ("gpt-oss", "triton"),
        *(
            pytest.param(family, "triton", marks=pytest.mark.slow)
            for family in FAMILIES
            if family != "gpt-oss"
        ),
    ],
)
def test_logits_are_those_of_transformers(
    family: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    more = {} if family.startswith("deepseek") else NO_WINDOW
    _, model = make_tiny_model(family, tmp_path, **more)
    expected = logits_of(model)
    model.save_pretrained(tmp_path)
    runner = runner_of(read_folder(tmp_path), kernels=kernels)
    # The interpreter takes a second for a step.
    prompts, steps = (PROMPTS[:3], STEPS[2:]) if kernels == "triton" else (PROMPTS, STEPS)
    for seed, chunks in enumerate(steps):
        for index, num_done, logits in mixed_steps(runner, prompts, chunks=chunks, seed=seed):
            torch.testing.assert_close(logits, expected[index][num_done - 1], rtol=1e-4, atol=1e-4)


def check_near(packed: ModelRunner, wide: ModelRunner) -> None:
    """Checks logits of packed weights beside those of the same weights as numbers."""
    assert packed.native is not None
    for seed, chunks in enumerate(STEPS):
        steps = (mixed_steps(each, PROMPTS, chunks=chunks, seed=seed) for each in (packed, wide))
        for (*place, found), (*same, expected) in zip(*steps, strict=True):
            assert place == same
            assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "Q4_0"), ("llama", "Q8_0"), ("qwen3moe", "Q4_1"), ("gpt-oss", "MXFP4")],
)
def test_packed_types_of_gguf(name: str, kind: str, tmp_path: Path, tiny_gguf: Any) -> None:
    origin = make_origin(name, tiny_gguf.vocab_size)
    logits_of(origin)
    file = file_of(name, origin, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    folder = read_folder(converted_folder(file, cache_dir=tmp_path))
    packed = runner_of(folder, dtype="auto", kv_dtype="float32")
    assert packed.native is not None
    experts = packed.native._model.layers[1].experts.contents
    assert {experts.mlps[e].down.kind for e in (ALL, NONE)} == {Kind[kind]}
    check_near(packed, runner_of(folder, kernels="torch"))


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v2", "deepseek-v3"])
def test_int8_weights(family: str, tmp_path: Path) -> None:
    _, model = make_tiny_model(family, tmp_path)
    logits_of(model)
    model.save_pretrained(tmp_path)
    folder = read_folder(tmp_path)
    check_near(runner_of(folder, weights="int8"), runner_of(folder, kernels="torch"))
