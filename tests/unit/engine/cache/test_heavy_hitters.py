"""KV budgets with heavy hitters: which blocks leave, and that no way to run a sequence changes it.

A model with random weights, whose greedy tokens are transformers' with all attention weights summed
and the mask written out.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tandem.common.kv_budget import HEAVY_HITTERS, KvBudget
from tandem.common.sampling_params import SamplingParams
from tandem.engine.cache.heavy_hitters import HeavyHitters, border_tokens, least_tokens
from tandem.errors import BadRequest, InternalError, NeverFits
from tests.engine_driver import drive_all, make_spec
from tests.grouped_toy import make_grouped_engine
from tests.tiny_models import make_tiny_model
from tests.unit.engine.tiny_runs import (
    Tiny,
    load,
    prefill_elsewhere,
    random_prompts,
    resumed,
    specs_of,
)

BLOCK = 16
NUM_TOKENS = 90  # over a border, or two
BUDGET = KvBudget(tokens=224, sinks=5, policy=HEAVY_HITTERS)
PROMPTS = random_prompts(400, 256, 190)
requests = partial(specs_of, PROMPTS, NUM_TOKENS, budget=BUDGET)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_model("llama", folder, eos_token_id=None, max_position_embeddings=600)


class Reference:
    """The rules of docs/kv_budgets.md, by positions and with transformers' own weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation("eager")
        self._model = model

    def greedy(self, token_ids: list[int]) -> list[int]:
        """Returns the most likely token after each one."""
        size, num = border_tokens(BLOCK), len(token_ids)
        seen = torch.zeros(num, num, dtype=torch.bool)
        kept = list(range(0, num, BLOCK))  # first tokens of blocks
        start = 0
        while True:
            end = min(start + size, num)
            for i in range(start, end):
                for first in kept:
                    seen[i, first : min(first + BLOCK, i + 1)] = first <= i
            if end == num:
                return self._forward(token_ids, seen)[0]
            computed = [first for first in kept if first < end]
            if len(computed) * BLOCK + size > BUDGET.tokens:
                leave = self._evicted(token_ids[:end], seen[:end, :end], computed)
                kept = [first for first in kept if first not in leave]
            start = end

    def _evicted(self, token_ids: list[int], seen: torch.Tensor, kept: list[int]) -> set[int]:
        _, weights = self._forward(token_ids, seen)
        sums = {first: float(weights[first : first + BLOCK].sum()) for first in kept}
        num = -(-(len(kept) * BLOCK + border_tokens(BLOCK) - BUDGET.tokens) // BLOCK)
        num_sinks = -(-BUDGET.sinks // BLOCK)
        num_recent = (BUDGET.tokens - num_sinks * BLOCK - border_tokens(BLOCK)) // 2 // BLOCK
        choice = kept[num_sinks : len(kept) - num_recent]
        return set(sorted(choice, key=sums.__getitem__)[:num])

    def _forward(self, token_ids: list[int], seen: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Returns greedy tokens, and the weight of each key from all queries, heads and layers."""
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.no_grad():
            out = self._model(
                torch.tensor([token_ids]), attention_mask=mask[None, None], output_attentions=True
            )
        weights = sum(layer[0].double().sum((0, 1)) for layer in out.attentions)
        assert isinstance(weights, torch.Tensor)
        return out.logits[0].argmax(-1).tolist(), weights


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> dict[str, list[int]]:
    """Returns the greedy tokens of a plain run, which are transformers'."""
    made = drive_all(load(tiny)[0], *requests()).token_ids
    reference = Reference(tiny[1])
    for i, prompt in enumerate(PROMPTS):
        follow = reference.greedy(prompt + made[str(i)])
        assert follow[len(prompt) - 1 : -1] == made[str(i)]
    others = (None, KvBudget(BUDGET.tokens, BUDGET.sinks))
    for budget in others:
        assert made != drive_all(load(tiny)[0], *requests(budget=budget)).token_ids
    return made


@pytest.mark.parametrize(
    ("kernels", "step_tokens"),
    [*(("native", tokens) for tokens in (3, 7, 100, 512)), ("torch", 50)],
)
def test_chunks(tiny: Tiny, expected: dict[str, list[int]], step_tokens: int, kernels: str) -> None:
    engine, _ = load(tiny, step_tokens=step_tokens, kernels=kernels)
    assert drive_all(engine, *requests()).token_ids == expected
    assert engine.load().blocks_used == engine.load().blocks_cached == 0


def test_float32_that_is_not_invariant(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    engine, _ = load(tiny, numerics="fast", dtype="float32", kernels="torch")
    assert drive_all(engine, *requests()).token_ids == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_dtype": "int8"},
        {"kv_dtype": "k8v4", "block_size": 32},
        {"block_size": 5},
    ],
    ids=str,
)
def test_any_types_and_blocks(tiny: Tiny, settings: dict[str, object]) -> None:
    """Tokens do not depend on chunks, nor on what shares the steps."""
    settings = {"numerics": "fast", "num_blocks": 256} | settings
    together = drive_all(load(tiny, **settings)[0], *requests()).token_ids  # type: ignore[arg-type]
    engine, _ = load(tiny, step_tokens=23, **settings)  # type: ignore[arg-type]
    for spec in requests():
        assert drive_all(engine, spec).token_ids == {spec.sequence_id: together[spec.sequence_id]}


def test_nothing_is_shared(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    """Neither with the same prompts, before or after, nor with themselves."""
    engine, _ = load(tiny, num_blocks=200)
    full = drive_all(engine, *requests(budget=None))
    held = engine.load().blocks_cached
    under = drive_all(engine, *requests())
    assert under.token_ids == expected
    assert engine.load().blocks_cached == held
    assert not any(report.stored for report in under.reports)
    again = drive_all(engine, *requests())
    assert (again.token_ids, again.ends["0"].num_cached_tokens) == (expected, 0)
    assert drive_all(engine, *requests(budget=None)).token_ids == full.token_ids


def test_preempted(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    engine, _ = load(tiny, num_blocks=40)
    outcome = drive_all(engine, *requests())
    assert outcome.token_ids == expected
    assert sum(end.num_preemptions for end in outcome.ends.values()) > 0


@pytest.mark.parametrize("num_made", [7, 63, 64])
def test_migrated(tiny: Tiny, expected: dict[str, list[int]], num_made: int) -> None:
    """Another engine goes on from the tokens made so far: the same blocks leave again."""
    engine, _ = load(tiny, step_tokens=50)
    tokens = drive_all(engine, *resumed(requests(), expected, num_made)).token_ids
    assert tokens == {name: made[num_made:] for name, made in expected.items()}


def test_prefilled_on_another_engine(tiny: Tiny, expected: dict[str, list[int]]) -> None:
    """Kept blocks travel, and their sums, when the prompt is computed whole."""
    source = load(tiny, step_tokens=32)
    outcome, num_reserved = prefill_elsewhere(source, load(tiny), requests)
    assert outcome.token_ids == expected
    assert num_reserved == {"0": 11, "1": 10, "2": 12}
    assert source[0].load().blocks_cached == 0


def test_sums_that_are_of_other_blocks_are_not_taken() -> None:
    with pytest.raises(InternalError, match="3 attention sums for 11 KV blocks"):
        HeavyHitters(BUDGET, BLOCK).set_sums(400, [1.0] * 3)


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
    end = drive_all(load(tiny)[0], spec).ends["a"]
    follow = Reference(tiny[1]).greedy(prompt)
    assert [each.top_ids[0] for each in end.prompt_logprobs] == follow[:-1]


def test_it_holds_no_more_than_its_budget(tiny: Tiny) -> None:
    engine, _ = load(tiny, num_blocks=14)
    engine.add(requests()[0])
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        assert engine.load().blocks_used <= BUDGET.tokens // BLOCK
    with pytest.raises(NeverFits, match="holds only 224 tokens"):
        engine.add(make_spec("b", PROMPTS[0], kv_budget=KvBudget(225, 5, HEAVY_HITTERS)))


def test_which_blocks_leave() -> None:
    """Blocks with the least attention leave, of those between the sinks and the recent ones, at
    borders; where they were, the next tokens go."""
    hitters = HeavyHitters(KvBudget(tokens=16 * 14, sinks=1, policy=HEAVY_HITTERS), BLOCK)
    table = list(range(100, 114))
    assert (
        hitters.num_until_eviction(0),
        hitters.num_until_eviction(150),
        hitters.num_until_eviction(192),
    ) == (192, 42, 64)
    hitters.sums(192)[:] = [0, 9, 3, 8, 2, 7, 6, 1, 1, 1, 1, 1]
    hitters.evict(table, 191)
    assert (table, hitters.num_evicted_tokens) == (list(range(100, 114)), 0)
    hitters.evict(table, 192)  # four are recent: 108 to 111
    assert table == [100, 101, 102, 103, 105, 106, 108, 109, 110, 111, 104, 107, 112, 113]
    assert hitters.num_evicted_tokens == 32
    assert hitters.sums(176).tolist() == [0, 9, 3, 8, 7, 6, 1, 1, 1, 1, 0]
    assert (hitters.num_blocks(192), hitters.num_blocks(256), hitters.num_blocks(257)) == (
        10,
        10,
        11,
    )


def test_what_cannot_be_served_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    windows, _ = make_grouped_engine((None, 8), num_blocks=8)
    with pytest.raises(BadRequest, match="some layers of the model have a sliding window"):
        windows.add(make_spec("a", [1], kv_budget=BUDGET))
    assert least_tokens(sinks=5, block_size=BLOCK) == 208
    with pytest.raises(BadRequest, match=r"207 tokens, but .* needs at least 208"):
        load(tiny)[0].add(make_spec("a", [1], kv_budget=KvBudget(207, 5, HEAVY_HITTERS)))
