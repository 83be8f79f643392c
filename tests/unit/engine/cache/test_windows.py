"""Mistral v0.1's configuration, with random weights: every layer has a window of 40 tokens.

However prompts of 150 tokens are cut and wherever their KV comes from, greedy tokens are
transformers'.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.engine_driver import Outcome, drive, drive_all, make_spec
from tests.tiny_models import make_tiny_model
from tests.unit.engine.tiny_runs import (
    Tiny,
    load,
    prefill_elsewhere,
    random_prompts,
    resumed,
    specs_of,
)

NUM_TOKENS = 24
PROMPTS = random_prompts(150, 97, 30)
requests = partial(specs_of, PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny_model("mistral-window", tmp_path_factory.mktemp("tiny"))


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
    ("kernels", "step_tokens"),
    [*(("native", tokens) for tokens in (1, 7, 64, 512)), ("torch", 7), ("torch", 64)],
)
def test_chunks(tiny: Tiny, expected: dict[str, list[int]], step_tokens: int, kernels: str) -> None:
    engine, _ = load(tiny, step_tokens=step_tokens, kernels=kernels)
    assert drive_all(engine, *requests()).token_ids == expected
    assert engine.load().blocks_used == 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", ["qwen2-some-windows", "gemma3"])
def test_windows_of_some_layers(family: str, kernels: str, tmp_path: Path) -> None:
    """Chunks, then a warm run, of models whose other layers see the whole context."""
    tiny = make_tiny_model(family, tmp_path, eos_token_id=None)
    engine, _ = load(tiny, step_tokens=64, kernels=kernels)
    made = drive_all(engine, *requests()).token_ids
    assert made == drive_all(engine, *requests()).token_ids
    check(tiny, made)


def check(tiny: Tiny, made: dict[str, list[int]]) -> None:
    for i, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            logits = tiny[1](torch.tensor([prompt + made[str(i)]])).logits[0]
        assert len(made[str(i)]) == NUM_TOKENS
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == made[str(i)]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    "family",
    [
        "gemma4",
        "mimo-v2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4-moe", "gemma3n")),
    ],
)
def test_groups_whose_heads_differ(family: str, kernels: str, tmp_path: Path) -> None:
    """Cold in chunks, warm, preempted, migrated and forked."""
    tiny = make_tiny_model(family, tmp_path, eos_token_id=None)
    engine, _ = load(tiny, step_tokens=64, kernels=kernels)
    made = drive_all(engine, *requests()).token_ids
    check(tiny, made)
    warm = drive_all(engine, *requests())
    assert warm.token_ids == made
    assert warm.ends["0"].num_cached_tokens >= 144
    small, _ = load(tiny, num_blocks=11, kernels=kernels)
    preempted = drive_all(small, *requests())
    assert preempted.token_ids == made
    assert sum(end.num_preemptions for end in preempted.ends.values()) > 0
    other, _ = load(tiny, kernels=kernels)
    moved = drive_all(other, *resumed(requests(), made, 7)).token_ids
    assert moved == {name: tokens[7:] for name, tokens in made.items()}
    outcome = Outcome()
    for name in "0123":
        spec = make_spec(
            name, PROMPTS[0], max_tokens=NUM_TOKENS, fork_of="" if name == "0" else "0"
        )
        other.add(spec)
        outcome.take(other.step())
    drive(other, outcome)
    assert list(outcome.token_ids.values()) == [made["0"]] * 4


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
    tokens = drive_all(engine, *resumed(requests(), expected, 7)).token_ids
    assert tokens == {name: made[7:] for name, made in expected.items()}


def test_prefilled_on_another_engine(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    outcome, _ = prefill_elsewhere(load(tiny, step_tokens=32), load(tiny), requests)
    assert outcome.token_ids == expected
