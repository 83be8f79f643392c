"""Mistral v0.1's configuration, with random weights: every layer has a window of 40 tokens.

However prompts of 150 tokens are cut and wherever their KV comes from, greedy tokens are
transformers'.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tandem.config.engine import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import FinalBlocks, Mode, SequenceSpec
from tandem.models.source import ModelFolder
from tests.engine_driver import Outcome, drive, drive_all, make_spec
from tests.tiny_models import make_tiny_model

NUM_TOKENS = 24
PROMPTS = [
    torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (150, 97, 30)
]
Tiny = tuple[ModelFolder, PreTrainedModel]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny_model("mistral-window", tmp_path_factory.mktemp("tiny"))


def load(
    tiny: Tiny, *, num_blocks: int = 64, budget: int = 512, **settings: str
) -> tuple[Engine, torch.Tensor]:
    settings.setdefault("numerics", "invariant")
    config = EngineConfig(
        model="",
        device="cpu",
        num_blocks=num_blocks,
        max_tokens_per_step=budget,
        itl_target_s=0.0,
        **settings,  # type: ignore[arg-type]
    )
    runner = ModelRunner(tiny[0], config)
    return Engine(config, runner, tiny[0].fingerprint), runner.pools[0].memory


def requests(mode: Mode = Mode.LOCAL) -> list[SequenceSpec]:
    return [
        make_spec(str(i), prompt, max_tokens=NUM_TOKENS, mode=mode)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> dict[str, list[int]]:
    """Returns the greedy tokens of a plain run, which are transformers'."""
    made = drive_all(load(tiny)[0], *requests()).token_ids
    for i, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            logits = tiny[1](torch.tensor([prompt + made[str(i)]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == made[str(i)]
    return made


@pytest.mark.parametrize(
    ("kernels", "budget"),
    [*(("native", budget) for budget in (1, 7, 64, 512)), ("torch", 7), ("torch", 64)],
)
def test_chunks(tiny: Tiny, expected: dict[str, list[int]], budget: int, kernels: str) -> None:
    engine, _ = load(tiny, budget=budget, kernels=kernels)
    assert drive_all(engine, *requests()).token_ids == expected
    assert engine.load().blocks_used == 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", ["qwen2-some-windows", "gemma3"])
def test_windows_of_some_layers(family: str, kernels: str, tmp_path: Path) -> None:
    """Chunks, then a warm run, of models whose other layers see the whole context."""
    tiny = make_tiny_model(family, tmp_path, eos_token_id=None)
    engine, _ = load(tiny, budget=64, kernels=kernels)
    made = drive_all(engine, *requests()).token_ids
    assert made == drive_all(engine, *requests()).token_ids
    for i, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            logits = tiny[1](torch.tensor([prompt + made[str(i)]])).logits[0]
        assert len(made[str(i)]) == NUM_TOKENS
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == made[str(i)]


def test_float32_that_is_not_invariant(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    engine, _ = load(tiny, numerics="fast", dtype="float32", kernels="torch")
    assert drive_all(engine, *requests()).token_ids == expected


def test_warm(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    engine, _ = load(tiny)
    drive_all(engine, *requests())
    again = drive_all(engine, *requests())
    assert again.token_ids == expected
    assert [again.ends[str(i)].num_cached_tokens for i in range(3)] == [149, 96, 29]


def test_preempted(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    engine, _ = load(tiny, num_blocks=9)
    outcome = drive_all(engine, *requests())
    assert outcome.token_ids == expected
    assert sum(end.num_preemptions for end in outcome.ends.values()) > 0


def test_migrated(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    """Another engine goes on from the tokens made so far."""
    engine, _ = load(tiny)
    specs = [
        make_spec(
            str(i),
            prompt + expected[str(i)][:7],
            num_prompt_tokens=len(prompt),
            max_tokens=NUM_TOKENS,
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    tokens = drive_all(engine, *specs).token_ids
    assert tokens == {name: made[7:] for name, made in expected.items()}


def test_prefilled_on_another_engine(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    """Blocks are copied as soon as they are final, in the middle of the source's step."""
    (source, source_kv), (here, here_kv) = load(tiny, budget=32), load(tiny)
    for spec in requests(Mode.WAITING_FOR_REMOTE_KV):
        here.add(spec)
    outcome = Outcome()
    outcome.take(here.step())
    for spec in requests(Mode.PREFILL_ONLY):
        source.add(spec)

    def pull(final_blocks: list[FinalBlocks]) -> None:
        for final in final_blocks:
            table = here.block_ids(final.sequence_id)[final.first_block :]
            here_kv[table[: len(final.block_ids)]] = source_kv[final.block_ids]

    while source.has_work():
        for done in source.step(pull).prefilled:
            source.remove(done.sequence_id)
            outcome.token_ids[done.sequence_id] = [done.first_token_id]
            here.commit(done.sequence_id, done.first_token_id)
    assert drive(here, outcome).token_ids == expected
    assert sum(report.num_prefill_tokens for report in outcome.reports) == 0
