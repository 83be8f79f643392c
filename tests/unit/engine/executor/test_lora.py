"""LoRA adapters against transformers' model with their weights merged in: torch and C++."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.errors import AdapterUnavailable
from tandem.models.folder import ModelFolder
from tests.lora_adapters import ALL, ATTENTION, describe, merged, write_adapter
from tests.tiny_models import make_tiny_model

PROMPTS = [
    torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 9, 40, 23)
]
WAYS = [("fast", "torch"), ("fast", "native"), ("invariant", "torch"), ("invariant", "native")]
OF_LATENT = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
OF_DELTA = ("q_proj", "k_proj", "o_proj", "out_proj", "gate_proj")
OF_KIMI = tuple(f"{part}_proj" for part in (*"qkvbo", "f_a", "f_b", "g_a", "g_b"))
OF_MAMBA = ("in_proj", "out_proj", "q_proj", "v_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def make_runner(folder: Any, numerics: str, kernels: str, **more: Any) -> ModelRunner:
    config = EngineConfig(
        model="",
        numerics=numerics,  # type: ignore[arg-type]
        kernels=kernels,  # type: ignore[arg-type]
        block_size=8,
        device="cpu",
        **({"dtype": "float32"} | more),
    )
    runner = ModelRunner(folder, config)
    runner.allocate(*[80] * len(runner.layout().groups))
    return runner


def add(runner: ModelRunner, path: Path) -> str:
    adapter = describe("any", path, runner._model_config)
    runner.add_adapter(runner.load_adapter(adapter))
    return adapter.digest


def run(runner: ModelRunner, sequences: list[tuple[list[int], str]]) -> list[torch.Tensor]:
    """Prefills all in one step but their last tokens, which are the next step's."""
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(len(sequences))]
    rows = list(zip(sequences, tables, strict=True))
    prompts = [
        SequenceSlice(
            tokens[:-1],
            len(tokens) - 1,
            table,
            False,
            adapter=digest,
            other_tables=[table] * (len(runner.pools) - 1),
        )
        for (tokens, digest), table in rows
        if len(tokens) > 1
    ]
    if prompts:
        runner.forward(StepBatch(prompts))
    last = [
        SequenceSlice(
            tokens[-1:],
            len(tokens),
            table,
            True,
            adapter=digest,
            other_tables=[table] * (len(runner.pools) - 1),
        )
        for (tokens, digest), table in rows
    ]
    return list(runner.forward(StepBatch(last)).clone())


@dataclass(frozen=True)
class Case:
    """A model and an adapter of it; and for each of PROMPTS transformers' logits [vocab] after it,
    of the model that is asked and of the other one: merged weights, or for the second prompt the
    base."""

    folder: ModelFolder
    adapter: Path
    expected: list[torch.Tensor]
    other: list[torch.Tensor]


@pytest.fixture(
    scope="module",
    params=[
        ("llama", {"target_modules": list(ATTENTION)}),
        ("llama", {"target_modules": list(ALL), "r": 20, "use_rslora": True}),
        ("llama-linear-biases", {"target_modules": ["v_proj", "down_proj"], "r": 1}),
        ("qwen3", {"target_modules": "all-linear", "r": 4}),
        ("olmo2", {"target_modules": list(ALL), "r": 16}),
        ("granite", {"target_modules": ["o_proj", "up_proj"], "r": 33, "lora_alpha": 5}),
        ("phi3", {"target_modules": list(FUSED), "r": 8}),
        ("phi3-longrope", {"target_modules": list(FUSED), "r": 8}),
        ("gpt-oss", {"target_modules": list(ATTENTION)}),
        ("deepseek-v2", {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"]}),
        ("deepseek-v2", {"target_modules": ["kv_b_proj", "gate_proj", "down_proj"], "r": 12}),
        ("deepseek-v2-groups", {"target_modules": "all-linear", "r": 5}),
        ("deepseek-v3", {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa"], "r": 20}),
        ("deepseek-v3", {"target_modules": ["q_b_proj", "kv_b_proj", "up_proj"], "r": 30}),
        ("deepseek-v3-halves", {"target_modules": "all-linear", "r": 4}),
        ("gemma3", {"target_modules": r".*\.(k_proj|gate_proj|o_proj)", "r": 8}),
        ("qwen3-next", {"target_modules": [*OF_DELTA, "in_proj_qkvz", "in_proj_ba"], "r": 6}),
        ("falcon-h1", {"target_modules": [*OF_MAMBA, "o_proj", "down_proj"], "r": 5}),
        *(
            pytest.param((family, {"target_modules": targets, "r": 7}), marks=pytest.mark.slow)
            for family, targets in (
                ("qwen3.5", [*OF_DELTA, *(f"in_proj_{part}" for part in ("qkv", "z", "b", "a"))]),
                ("granite4", [*OF_MAMBA, "input_linear", "output_linear"]),
                ("nemotron-h", [*OF_MAMBA, "up_proj", "down_proj"]),
                ("lfm2", ["in_proj", "out_proj", "q_proj", "w1", "w2"]),
                ("kimi-linear", [*OF_KIMI, "kv_b_proj", "down_proj"]),
                ("olmo-hybrid", ["q_proj", "k_proj", "g_proj", "b_proj", "o_proj", "up_proj"]),
            )
        ),
    ],
    ids=lambda param: "-".join((param[0], *map(str, param[1].values()))),
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, settings = request.param
    path = tmp_path_factory.mktemp("case")
    folder, reference = make_tiny_model(family, path / "model")
    targets = settings["target_modules"]
    modules = {
        "all-linear": (*ALL, *OF_LATENT),
        r".*\.(k_proj|gate_proj|o_proj)": ("k_proj", "gate_proj", "o_proj"),
    }.get(targets if isinstance(targets, str) else "")
    made = write_adapter(path / "one", folder.config, modules=modules, **settings)
    changed = merged(
        reference,
        made,
        alpha=settings.get("lora_alpha", 16),
        use_rslora=settings.get("use_rslora", False),
    )
    with torch.no_grad():
        of_base, of_changed = (
            [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
            for model in (reference, changed)
        )
    of_base[1], of_changed[1] = of_changed[1], of_base[1]
    return Case(folder, path / "one", expected=of_changed, other=of_base)


@pytest.mark.parametrize(("numerics", "kernels"), WAYS)
def test_logits_are_those_of_merged_weights(case: Case, numerics: str, kernels: str) -> None:
    runner = make_runner(case.folder, numerics, kernels)
    digest = add(runner, case.adapter)
    # The base's rows stand between the adapter's.
    found = run(runner, [(PROMPTS[i], digest if i != 1 else "") for i in range(4)])
    for logits, expected, other in zip(found, case.expected, case.other, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert (logits - other).abs().max() > 1e-2


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_eight_adapters_and_the_base_equal_nine_runs_bit_by_bit(
    kernels: str, tmp_path: Path
) -> None:
    folder, _ = make_tiny_model("llama", tmp_path / "model")
    runner = make_runner(folder, "invariant", kernels)
    digests = [""]
    for i in range(8):
        targets = ALL if i % 2 else ATTENTION
        path = tmp_path / f"adapter-{i}"
        write_adapter(path, folder.config, seed=i, r=(4, 8, 16)[i % 3], target_modules=targets)
        digests.append(add(runner, path))
    prompt = PROMPTS[2]
    mixed = [(prompt[: 12 + i % 5], digests[i % 9]) for i in (4, 0, 8, 3, 1, 7, 2, 6, 5)]
    together = run(runner, mixed)
    alone = [run(runner, [one])[0] for one in mixed]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)
    assert len({tuple(logits.tolist()) for logits in alone}) == 9


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_bfloat16_stays_near_merged_weights(family: str, tmp_path: Path) -> None:
    all_experts = {"n_routed_experts": 6, "num_experts_per_tok": 6, "n_group": 3, "topk_group": 3}
    more = all_experts if family == "deepseek-v3" else {}
    folder, reference = make_tiny_model(family, tmp_path / "model", **more)
    targets = list(OF_LATENT if family == "deepseek-v3" else ALL)
    made = write_adapter(tmp_path / "one", folder.config, target_modules=targets)
    changed = merged(reference, made)
    for kernels, weights in (("native", "auto"), ("torch", "auto"), ("native", "int8")):
        runner = make_runner(folder, "fast", kernels, dtype="bfloat16", weights=weights)
        digest = add(runner, tmp_path / "one")
        (logits,) = run(runner, [(PROMPTS[3], digest)])
        with torch.no_grad():
            expected = changed(torch.tensor([PROMPTS[3]])).logits[0, -1]
        correlation = torch.corrcoef(torch.stack((logits, expected)))[0, 1]
        assert correlation > 0.99, (kernels, weights)


def test_files_that_changed_are_not_those_of_the_digest(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("llama", tmp_path / "model")
    runner = make_runner(folder, "fast", "auto")
    write_adapter(tmp_path / "one", folder.config)
    adapter = describe("one", tmp_path / "one", folder.config)
    runner.load_adapter(adapter)
    write_adapter(tmp_path / "one", folder.config, seed=2)
    with pytest.raises(AdapterUnavailable, match="have changed"):
        runner.load_adapter(adapter)
