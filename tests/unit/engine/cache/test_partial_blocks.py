"""Prompts that leave a cached one inside a block: what both have is copied, the rest computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.adapter import Adapter
from tandem.engine.types import Mode
from tests.engine_driver import Outcome, drive, drive_all, make_engine, make_spec
from tests.grouped_toy import continuation as grouped_continuation
from tests.grouped_toy import make_grouped_engine
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model
from tests.toy_runner import continuation

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def num_prefill(outcome: Outcome) -> int:
    return sum(report.num_prefill_tokens for report in outcome.reports)


@pytest.mark.parametrize("common", range(13))
def test_only_tokens_after_the_common_ones_are_computed(common: int) -> None:
    engine, _ = make_engine()
    drive_all(engine, make_spec("a", PROMPT))
    prompt = [*PROMPT[:common], 7, 7, 7, 7, 7]
    outcome = drive_all(engine, make_spec("b", prompt))
    assert outcome.token_ids["b"] == continuation(prompt, 5)
    assert num_prefill(outcome) == 5
    assert outcome.ends["b"].num_cached_tokens == common
    assert engine.load().blocks_used == 0


@pytest.mark.parametrize("length", range(1, 13))
def test_a_prompt_that_ends_in_a_cached_block_computes_its_last_token(length: int) -> None:
    engine, _ = make_engine()
    drive_all(engine, make_spec("a", PROMPT))
    outcome = drive_all(engine, make_spec("b", PROMPT[:length]))
    assert outcome.token_ids["b"] == continuation(PROMPT[:length], 5)
    assert num_prefill(outcome) == 1


def test_of_several_children_the_closest_one_is_copied() -> None:
    engine, _ = make_engine()
    for name, tail in {"a": [5, 9, 9, 9], "b": [5, 9, 2, 9], "c": [5, 0, 2, 6]}.items():
        drive_all(engine, make_spec(name, [*PROMPT[:4], *tail, 1]))
    outcome = drive_all(engine, make_spec("d", PROMPT[:9]))
    assert outcome.token_ids["d"] == continuation(PROMPT[:9], 5)
    assert outcome.ends["d"].num_cached_tokens == 7


def test_nothing_is_copied_between_salts_adapters_or_parents() -> None:
    engine, _ = make_engine(max_loras=2)
    for number, fields in enumerate(
        [{}, {"cache_salt": b"salt"}, {"adapter": Adapter("x", "/x", "digest", 1)}]
    ):
        engine.add(make_spec(str(number), PROMPT[:7], **fields))  # type: ignore[arg-type]
        outcome = Outcome()
        while str(number) not in outcome.ends:
            if engine.has_work():
                outcome.take(engine.step())
        assert outcome.ends[str(number)].num_cached_tokens == 0
    other = [7, 7, 7, 7, *PROMPT[:4], 9]  # the same tokens after others
    assert drive_all(engine, make_spec("p", other)).ends["p"].num_cached_tokens == 0


def test_the_copied_block_is_not_evicted_before_the_copy() -> None:
    engine, runner = make_engine(num_blocks=5)
    drive_all(engine, make_spec("old", PROMPT[:5], max_tokens=1))
    drive_all(engine, make_spec("new", [7] * 13, max_tokens=1))
    assert engine.stats().blocks_free == 1
    engine.add(make_spec("a", [*PROMPT[:3], 9, 9, 9], max_tokens=1))
    copied: list[tuple[int, int, int]] = []
    copy_blocks = runner.copy_blocks
    runner.copy_blocks = lambda copies: (copied.extend(copies), copy_blocks(copies))[1]  # type: ignore[method-assign]
    outcome = drive(engine)
    assert [(source, group) for source, _, group in copied] == [(0, 0)]
    assert copied[0][1] != 0
    assert outcome.token_ids["a"] == continuation([*PROMPT[:3], 9, 9, 9], 1)
    assert outcome.ends["a"].num_cached_tokens == 3


def test_a_prompt_that_needs_the_whole_pool_evicts_the_block_that_it_could_copy() -> None:
    engine, _ = make_engine(num_blocks=3)
    drive_all(engine, make_spec("a", PROMPT[:9], max_tokens=3))
    prompt = [*PROMPT[:2], 7, 7, 7, 7, 7, 7, 7, 7]
    outcome = drive_all(engine, make_spec("b", prompt, max_tokens=2))
    assert outcome.token_ids["b"] == continuation(prompt, 2)
    assert outcome.ends["b"].num_cached_tokens == 0


def test_log_probabilities_of_a_prompt_are_computed_of_all_its_tokens() -> None:
    engine, _ = make_engine()
    drive_all(engine, make_spec("a", PROMPT))
    assert num_prefill(drive_all(engine, make_spec("b", PROMPT[:7], prompt_logprobs=0))) == 7


def test_what_a_copy_spares_is_not_asked_of_a_peer() -> None:
    engine, runner = make_engine()
    drive_all(engine, make_spec("a", PROMPT))
    prompt = [*PROMPT[:7], 7, 7, 7]
    fields = {"mode": Mode.WAITING_FOR_REMOTE_KV}
    outcome = drive_all(engine, make_spec("b", prompt, remote_prefill_min_tokens=4, **fields))
    assert outcome.token_ids["b"] == continuation(prompt, 5)
    assert num_prefill(outcome) == 3
    # Whoever asks a peer all the same gets whole blocks from it.
    other = [*PROMPT[:7], 8, 8, 8]
    engine.add(make_spec("c", other, remote_prefill_min_tokens=3, **fields))
    (reserved,) = engine.step().reserved
    assert (reserved.num_cached_tokens, len(reserved.block_ids)) == (4, 2)
    runner.fill(engine.block_ids("c"), other, 1)
    engine.commit("c", continuation(other, 1)[0])
    outcome = drive(engine)
    assert outcome.token_ids["c"] == continuation(other, 5)[1:]


def test_a_prompt_for_a_peer_is_computed_from_a_copy() -> None:
    engine, runner = make_engine()
    drive_all(engine, make_spec("a", PROMPT))
    prompt = [*PROMPT[:6], 7, 7, 7]
    outcome = drive_all(engine, make_spec("b", prompt, mode=Mode.PREFILL_ONLY))
    assert num_prefill(outcome) == 3
    (prefilled,) = [p for report in outcome.reports for p in report.prefilled]
    assert (prefilled.first_token_id, prefilled.num_cached_tokens) == (
        continuation(prompt, 1)[0],
        6,
    )
    blocks = [b for r in outcome.reports for final in r.final_blocks for b in final.block_ids]
    again, _ = make_engine()
    drive_all(again, make_spec("b", prompt, mode=Mode.PREFILL_ONLY))
    _, fresh = make_engine()
    fresh.fill(list(range(3)), prompt, 0)
    assert runner.read(blocks, len(prompt)) == fresh.read(list(range(3)), len(prompt))


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Prompts each of which goes on from a beginning of an earlier one."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(2, 6))):
        base = draw(st.sampled_from(prompts)) if prompts else []
        kept = base[: draw(st.integers(0, len(base)))]
        prompts.append(kept + draw(st.lists(st.integers(0, 3), min_size=1, max_size=40)))
    return prompts


@given(trees(), st.sampled_from([2, 4, 16, 64]), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_tokens_of_any_tree_of_prompts(
    prompts: list[list[int]], block_size: int, budget: int, at_once: int
) -> None:
    longest = -(-(max(map(len, prompts)) + 3) // block_size)
    engine, _ = make_engine(
        block_size=block_size, num_blocks=2 * longest + 1, max_tokens_per_step=budget
    )
    outcome = Outcome()
    for first in range(0, len(prompts), at_once):
        for i, prompt in enumerate(prompts[first : first + at_once], first):
            engine.add(make_spec(str(i), prompt, max_tokens=3))
        drive(engine, outcome)
    for i, prompt in enumerate(prompts):
        assert outcome.token_ids[str(i)] == continuation(prompt, 3)
    assert engine.load().blocks_used == 0


@given(
    trees(),
    st.sampled_from([(None, 5), (None, 1), (3, 9), (6,), (None, 17)]),
    st.sampled_from([2, 4]),
    st.integers(2, 40),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_tokens_of_models_with_windows(
    prompts: list[list[int]],
    windows: tuple[int | None, ...],
    block_size: int,
    budget: int,
    for_peer: bool,
) -> None:
    engine, _ = make_grouped_engine(
        windows, num_blocks=120, block_size=block_size, max_tokens_per_step=budget
    )
    for i, prompt in enumerate(prompts):
        expected = grouped_continuation(prompt, 2, windows)
        if for_peer and i % 2:
            outcome = drive_all(engine, make_spec(str(i), prompt, mode=Mode.PREFILL_ONLY))
            assert outcome.reports[-1].prefilled[0].first_token_id == expected[0]
            engine.remove(str(i))
        else:
            outcome = drive_all(engine, make_spec(str(i), prompt, max_tokens=2))
            assert outcome.token_ids[str(i)] == expected
    assert engine.load().blocks_used == 0


CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("llama", {"kernels": kernels, "kv_dtype": dtype})
        for kernels in ("native", "torch")
        for dtype in ("auto", "int8", "fp8_e4m3", "k8v4", "int4")
    ),
    *(
        (family, {"kernels": kernels})
        for family in ("gemma3", "deepseek-v2")
        for kernels in ("native", "torch")
    ),
]
# The pool copies blocks; of what torch computes, one dtype of numbers and one of packed ones.
TORCH_IN_CI = [("llama", {"kernels": "torch", "kv_dtype": dtype}) for dtype in ("auto", "int4")]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param(
            *case,
            marks=[] if case[1]["kernels"] == "native" or case in TORCH_IN_CI else pytest.mark.slow,
        )
        for case in CASES
    ],
)
def test_tokens_of_real_models_are_those_without_a_cache(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Blocks of 16 and of 64 tokens, chunks, and prompts that part everywhere in a block."""
    folder, _ = make_tiny_model(family, tmp_path, eos_token_id=None)
    rng = random.Random(3)
    base = [rng.randrange(3, 90) for _ in range(150)]
    prompts = [base]
    for kept in (3, 17, 63, 70, 100, 127, 149):
        prompts.append(base[:kept] + [rng.randrange(3, 90) for _ in range(20)])
    for block_size in (16, 64):
        settings = {"block_size": block_size, "num_blocks": 30, "max_tokens_per_step": 48, **config}
        engines = [make_model_engine(folder, numerics="invariant", **settings)[0] for _ in range(2)]
        num_copied = 0
        for i, prompt in enumerate(prompts):
            made = [drive_all(each, make_spec(str(i), prompt, max_tokens=8)) for each in engines]
            assert made[0].token_ids == made[1].token_ids
            num_copied += made[0].ends[str(i)].num_cached_tokens % block_size > 0
            engines[1].reset_prefix_cache()
        assert num_copied >= 4
