"""KV budgets of sequences: the mask by position, whatever way a sequence runs, and what is held.

A model with random weights, whose greedy tokens under the mask are transformers' with the same mask
written out, for all layers that have no window of their own.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tandem.common.kv_budget import KvBudget, check_budget
from tandem.common.sampling_params import SamplingParams
from tandem.errors import BadRequest, NeverFits
from tests.engine_driver import Outcome, drive, drive_all, make_engine, make_spec
from tests.grouped_toy import continuation, make_grouped_engine
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
BUDGET = KvBudget(tokens=40, sinks=5)
PROMPTS = random_prompts(150, 97, 30)
requests = partial(specs_of, PROMPTS, NUM_TOKENS, budget=BUDGET)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), eos_token_id=None)


def greedy(model: PreTrainedModel, token_ids: list[int], budget: KvBudget) -> list[int]:
    """The most likely token after each one, by transformers with the mask written out."""
    i, j = torch.arange(len(token_ids)).view(-1, 1), torch.arange(len(token_ids))
    num_last = budget.tokens - budget.sinks
    seen = (j <= i) & ((j < budget.sinks) | (j > i - num_last))
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), attention_mask=mask[None, None]).logits[0]
    return logits.argmax(-1).tolist()


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> dict[str, list[int]]:
    """Returns the greedy tokens of a plain run, which are transformers'."""
    made = drive_all(load(tiny)[0], *requests()).token_ids
    for i, prompt in enumerate(PROMPTS):
        follow = greedy(tiny[1], prompt + made[str(i)], BUDGET)
        assert follow[len(prompt) - 1 : -1] == made[str(i)]
    assert made != drive_all(load(tiny)[0], *requests(budget=None)).token_ids
    return made


@pytest.mark.parametrize(
    ("kernels", "step_tokens"),
    [*(("native", tokens) for tokens in (1, 7, 64, 512)), ("torch", 7), ("torch", 64)],
)
def test_chunks(tiny: Tiny, expected: dict[str, list[int]], step_tokens: int, kernels: str) -> None:
    engine, _ = load(tiny, step_tokens=step_tokens, kernels=kernels)
    assert drive_all(engine, *requests()).token_ids == expected
    assert engine.load().blocks_used == engine.load().blocks_cached == 0


@pytest.mark.parametrize("block_size", [1, 64])
def test_any_block_size(tiny: Tiny, expected: dict[str, list[int]], block_size: int) -> None:
    engine, _ = load(tiny, num_blocks=1024 // block_size, block_size=block_size)  # type: ignore[arg-type]
    assert drive_all(engine, *requests()).token_ids == expected


def test_float32_that_is_not_invariant(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    engine, _ = load(tiny, numerics="fast", dtype="float32", kernels="torch")
    assert drive_all(engine, *requests()).token_ids == expected


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_layers_with_a_window_keep_it(kernels: str, tmp_path: Path) -> None:
    family = "qwen2-some-windows"
    folder, model = make_tiny_model(family, tmp_path, eos_token_id=None)
    engine, _ = load((folder, model), step_tokens=64, kernels=kernels)
    window = next(each.window for each in folder.config.layers if each.window)
    made = drive_all(engine, *requests(budget=KvBudget(window, 0))).token_ids
    for i, prompt in enumerate(PROMPTS):
        follow = greedy(model, prompt + made[str(i)], KvBudget(window, 0))
        assert follow[len(prompt) - 1 : -1] == made[str(i)]


def test_a_budget_that_is_never_reached_changes_nothing(tiny: Tiny) -> None:
    plain = drive_all(load(tiny)[0], *requests(budget=None)).token_ids
    assert drive_all(load(tiny)[0], *requests(budget=KvBudget(174, 0))).token_ids == plain


def test_nothing_is_shared(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    """Neither with the same prompts, before or after, nor with themselves; also not by a fork."""
    engine, _ = load(tiny)
    full = drive_all(engine, *requests(budget=None))
    held = engine.load().blocks_cached
    under = drive_all(engine, *requests())
    assert under.token_ids == expected
    assert engine.load().blocks_cached == held
    assert not any(report.stored for report in under.reports)
    again = drive_all(engine, *requests())
    assert (again.token_ids, again.ends["0"].num_cached_tokens) == (expected, 0)
    assert drive_all(engine, *requests(budget=None)).token_ids == full.token_ids
    first = make_spec("a", PROMPTS[2], max_tokens=NUM_TOKENS, kv_budget=BUDGET)
    engine.add(first)
    outcome = Outcome()
    outcome.take(engine.step())
    engine.add(make_spec("b", PROMPTS[2], max_tokens=NUM_TOKENS, kv_budget=BUDGET, fork_of="a"))
    drive(engine, outcome)
    assert outcome.token_ids == {"a": expected["2"], "b": expected["2"]}


def test_preempted(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    engine, _ = load(tiny, num_blocks=7)
    outcome = drive_all(engine, *requests())
    assert outcome.token_ids == expected
    assert sum(end.num_preemptions for end in outcome.ends.values()) > 0


def test_migrated(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    """Another engine goes on from the tokens made so far, which it computes under the same mask."""
    engine, _ = load(tiny, step_tokens=50)
    tokens = drive_all(engine, *resumed(requests(), expected, 7)).token_ids
    assert tokens == {name: made[7:] for name, made in expected.items()}


def test_prefilled_on_another_engine(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    """Blocks that the decoding engine sees travel."""
    source = load(tiny, step_tokens=32)
    outcome, num_reserved = prefill_elsewhere(source, load(tiny), requests)
    assert outcome.token_ids == expected
    assert num_reserved == {"0": 5, "1": 5, "2": 2}
    assert source[0].load().blocks_cached == 0


def test_log_probabilities_of_a_prompt_are_those_under_the_budget(tiny: Tiny) -> None:
    prompt = PROMPTS[0]
    spec = make_spec(
        "a",
        prompt,
        max_tokens=1,
        kv_budget=BUDGET,
        prompt_logprobs=1,
        sampling=SamplingParams(temperature=0, logprobs=1),
    )
    end = drive_all(load(tiny, step_tokens=64)[0], spec).ends["a"]
    follow = greedy(tiny[1], prompt, BUDGET)
    assert [each.top_ids[0] for each in end.prompt_logprobs] == follow[:-1]


def test_it_holds_no_more_than_its_budget() -> None:
    """12 tokens in blocks of 4: two of the first 5 tokens, and two and a part of the window's 7."""
    engine, _ = make_grouped_engine((None,), num_blocks=8, max_tokens_per_step=4)
    spec = make_spec("a", list(range(60)), max_tokens=40, kv_budget=KvBudget(12, 5))
    engine.add(spec)
    outcome = Outcome()
    while engine.has_work():
        outcome.take(engine.step())
        engine.check_integrity()
        assert engine.load().blocks_used <= 6
    assert outcome.token_ids["a"] == continuation(
        spec.token_ids, 40, (None,), budget=spec.kv_budget
    )
    with pytest.raises(NeverFits, match="holds only 32 tokens"):
        engine.add(make_spec("b", list(range(60)), max_tokens=40))
    with pytest.raises(NeverFits, match="holds only 32 tokens"):
        engine.add(make_spec("c", list(range(60)), kv_budget=KvBudget(40, 0)))


def test_what_cannot_be_served_is_refused() -> None:
    windows, _ = make_grouped_engine((8,), num_blocks=8)
    with pytest.raises(BadRequest, match="all layers of the model already have a sliding window"):
        windows.add(make_spec("a", [1], kv_budget=BUDGET))
    with pytest.raises(BadRequest, match="kv_budget is not supported: the toy"):
        make_engine()[0].add(make_spec("a", [1], kv_budget=BUDGET))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (KvBudget(0), "tokens is 0; it must be from 1"),
        (KvBudget(2**31), "tokens is 2147483648; it must be from 1 to 2147483647"),
        (KvBudget(4), "sinks is 4; it must be from 0 to 3"),
        (KvBudget(4, -1), "sinks is -1; it must be from 0 to 3"),
        (KvBudget(4, 1, "x"), "policy is 'x'; it must be 'sinks_window' or 'heavy_hitters'"),
    ],
)
def test_what_is_wrong_with_a_budget(budget: KvBudget, message: str) -> None:
    with pytest.raises(BadRequest, match=f"kv_budget is not valid: its {message}"):
        check_budget(budget)
