"""Sequences with a grammar on a tiny model: the same on all kernels, preempted and moved.

The vocabulary is the first 203 tokens of the built-in model: control tokens, then single bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import PreTrainedModel

from tandem.common.kv_budget import HEAVY_HITTERS, KvBudget
from tandem.common.sampling_params import SamplingParams
from tandem.engine import engine as engine_module
from tandem.engine.engine import Engine
from tandem.engine.executor.sampler import StepSampler
from tandem.engine.types import Mode, SequenceSpec, StepReport
from tandem.models.folder import ModelFolder
from tandem.models.grammars import masks
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.masks import GrammarMasks, GrammarMatcher
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tests.engine_driver import Outcome, drive, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_random_speaker, make_tiny_model

EOS = 2
FOLDER = resolve("smollm2").path
TEXT = grammar_text(StructuredOutput("x", "regex", "[a-f]{8}(-[0-9]{4}){3}"))
DRAWN = SamplingParams(
    temperature=1.5, seed=5, presence_penalty=0.7, min_tokens=500, is_resolved=True
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, PreTrainedModel]:
    """A tiny random model in fp32, and transformers' own."""
    return make_tiny_model("mistral-wide-heads", tmp_path_factory.mktemp("tiny"))


def make(tiny: tuple[ModelFolder, PreTrainedModel], **settings: Any) -> Engine:
    settings = {"kernels": "native", "block_size": 4, "num_blocks": 128, **settings}
    compiler = GrammarCompiler(FOLDER / "tokenizer.json", 203, (EOS,))
    return make_model_engine(tiny[0], compiler, dtype="float32", **settings)[0]


def spec(sequence_id: str, prompt: list[int], **fields: Any) -> SequenceSpec:
    fields = {"max_tokens": 40, "stop_token_ids": [EOS], "grammar": TEXT, **fields}
    return make_spec(sequence_id, prompt, **fields)


def drive_compiled(engine: Engine, *specs: SequenceSpec) -> Outcome:
    """Adds the sequences and drives the engine to its end. While grammars are compiled, the engine
    has no work for them."""
    for each in specs:
        engine.add(each)
    deadline = time.monotonic() + 600
    while engine.awaits_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return drive(engine)


def test_all_kernels_draw_the_same_text_of_the_grammar(
    tiny: tuple[ModelFolder, PreTrainedModel],
) -> None:
    made = {}
    for kernels in ("torch", "native", "triton"):
        max_tokens = 6 if kernels == "triton" else 40  # Triton's interpreter takes long
        specs = [
            spec("greedy", [5, 9], max_tokens=max_tokens),
            spec("drawn", [7, 8, 9], sampling=DRAWN, max_tokens=max_tokens),
        ]
        outcome = drive_compiled(make(tiny, kernels=kernels), *specs)
        made[kernels] = outcome.token_ids
        reasons = {end.finish_reason for end in outcome.ends.values()}
        assert reasons == {"length" if kernels == "triton" else "stop"}
    tokenizer = Tokenizer(FOLDER)
    for name, token_ids in made["native"].items():
        assert token_ids[-1] == EOS
        assert len(tokenizer.decode(token_ids)) == 8 + 3 * 5
        assert made["torch"][name] == token_ids
        assert made["triton"][name] == token_ids[:6]


def test_a_preempted_or_moved_sequence_goes_on_in_its_grammar(
    tiny: tuple[ModelFolder, PreTrainedModel],
) -> None:
    specs = [spec("a", [*range(30)], sampling=DRAWN), spec("b", [*range(100, 129)])]
    whole = drive_compiled(make(tiny), *specs)
    preempted = drive_compiled(make(tiny, num_blocks=20), *specs)
    assert max(end.num_preemptions for end in preempted.ends.values()) > 0
    assert preempted.token_ids == whole.token_ids
    made = whole.token_ids["a"]
    moved = spec("a", [*range(30), *made[:7]], num_prompt_tokens=30, sampling=DRAWN)
    assert drive_compiled(make(tiny), moved).token_ids["a"] == made[7:]


def test_what_left_its_grammar_fails_alone(tiny: tuple[ModelFolder, PreTrainedModel]) -> None:
    left = spec("left", [5, 9, 100], num_prompt_tokens=2)
    outcome = drive_compiled(make(tiny), left, spec("right", [5, 9]))
    failed = [each for report in outcome.reports for each in report.failed]
    assert [(each.sequence_id, each.code) for each in failed] == [("left", "invalid_request")]
    assert outcome.ends["right"].finish_reason == "stop"


# Its names and its space are forced, in runs of several tokens.
NAMES = "weather forecast", "temperature", "observations of clouds"
FORCING = "".join(rf'"{name}": (1|22|"x+"),\n' for name in NAMES)
FORCED_TEXT = grammar_text(StructuredOutput("x", "regex", FORCING))


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A tiny random model with a real vocabulary."""
    return make_random_speaker(tmp_path_factory.mktemp("speaker"))


def speaking(folder: ModelFolder, **settings: Any) -> Engine:
    settings = {"kernels": "native", "block_size": 4, "num_blocks": 128, **settings}
    compiler = GrammarCompiler.of(folder)
    return make_model_engine(folder, compiler, numerics="invariant", **settings)[0]


def forced_spec(sequence_id: str = "a", **fields: Any) -> SequenceSpec:
    asked = {"sampling": SamplingParams(temperature=1.0, seed=9), "grammar": FORCED_TEXT, **fields}
    return spec(sequence_id, asked.pop("prompt", [5, 9, 11]), **asked)


def num_steps(outcome: Outcome) -> int:
    return sum(bool(report.num_decode_tokens) for report in outcome.reports)


def test_forced_tokens_take_no_step_and_change_no_token(speaker: ModelFolder) -> None:
    one_by_one = drive_compiled(speaking(speaker, forced_max=0), forced_spec())
    together = drive_compiled(speaking(speaker), forced_spec())
    tokens = one_by_one.token_ids["a"]
    assert together.token_ids["a"] == tokens
    assert tokens[-1] == EOS
    assert num_steps(one_by_one) == len(tokens) - 1
    assert num_steps(together) < len(tokens) // 2
    # A small budget of tokens cuts the runs into chunks.
    settings: dict[str, Any] = {"max_tokens_per_step": 3, "max_num_seqs": 2}
    pair = [forced_spec(), forced_spec("b", sampling=SamplingParams(temperature=1.0, seed=1))]
    cut = drive_compiled(speaking(speaker, **settings), *pair)
    assert cut.token_ids["a"] == tokens
    assert max(report.num_decode_tokens for report in cut.reports) <= 3
    # The model's log probabilities take its steps.
    measured = replace(forced_spec().sampling, logprobs=2)
    told = drive_compiled(speaking(speaker), forced_spec(sampling=measured))
    assert told.token_ids["a"] == tokens
    assert num_steps(told) == len(tokens) - 1
    assert len([one for r in told.reports for n in r.new_tokens for one in n.logprobs]) == len(
        tokens
    )


def test_forced_tokens_end_where_drawn_ones_would(speaker: ModelFolder) -> None:
    tokens = drive_compiled(speaking(speaker), forced_spec()).token_ids["a"]
    ends: list[dict[str, Any]] = [{"max_tokens": n} for n in range(1, len(tokens))]
    ends += [{"stop_token_ids": [EOS, tokens[n]]} for n in (1, 3, 8)]
    ends.append(
        {"sampling": replace(forced_spec().sampling, min_tokens=7, bad_words_token_ids=[[28]])}
    )
    specs = [forced_spec(str(n), **fields) for n, fields in enumerate(ends)]
    settings = {"num_blocks": 2000, "max_num_seqs": 64}
    one_by_one = drive_compiled(speaking(speaker, forced_max=0, **settings), *specs)
    together = drive_compiled(speaking(speaker, **settings), *specs)
    assert together.token_ids == one_by_one.token_ids
    for name, end in one_by_one.ends.items():
        assert together.ends[name].finish_reason == end.finish_reason


def test_forced_tokens_of_a_moved_or_preempted_sequence(speaker: ModelFolder) -> None:
    prompt = [*range(40, 60)]
    specs = [forced_spec(prompt=prompt), forced_spec("b", prompt=prompt[::-1])]
    whole = drive_compiled(speaking(speaker), *specs)
    preempted = drive_compiled(speaking(speaker, num_blocks=18), *specs)
    assert max(end.num_preemptions for end in preempted.ends.values()) > 0
    assert preempted.token_ids == whole.token_ids
    made = whole.token_ids["a"]
    moved = [
        forced_spec(str(n), prompt=[*prompt, *made[:n]], num_prompt_tokens=len(prompt))
        for n in range(1, len(made))
    ]
    rest = drive_compiled(speaking(speaker, num_blocks=2000), *moved).token_ids
    assert rest == {str(n): made[n:] for n in range(1, len(made))}


def all_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each step end before a mask that it began is made."""
    in_step, start = threading.Lock(), GrammarMasks.start
    update, skip_late = GrammarMatcher.update, StepSampler.skip_late

    def begin_step(masks: GrammarMasks, matchers: Iterable[GrammarMatcher]) -> None:
        in_step.acquire()
        start(masks, matchers)

    def end_step(sampler: StepSampler) -> None:
        skip_late(sampler)
        in_step.release()

    def update_after(matcher: GrammarMatcher) -> None:
        with in_step:
            update(matcher)

    monkeypatch.setattr(engine_module, "MASK_WAIT_S", 0.0)
    monkeypatch.setattr(GrammarMasks, "start", begin_step)
    monkeypatch.setattr(StepSampler, "skip_late", end_step)
    monkeypatch.setattr(GrammarMatcher, "update", update_after)


LATE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "each misses its step": all_are_late,
    "each is made before": lambda patch: patch.setattr(masks, "SLOW_MASK_S", -1.0),
    "no forced token is looked for": lambda patch: patch.setattr(masks, "FORCED_SEARCH_S", -1.0),
}


def first_tokens(outcome: Outcome) -> dict[str, int]:
    """Returns the tokens that peers are to go on with."""
    return {p.sequence_id: p.first_token_id for r in outcome.reports for p in r.prefilled}


@pytest.mark.parametrize("case", LATE)
def test_late_masks_change_no_token(
    case: str, speaker: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [*range(40, 60)]
    budget = KvBudget(200, 2, HEAVY_HITTERS)
    specs = [
        forced_spec(prompt=prompt),
        forced_spec("b", prompt=prompt[::-1], sampling=DRAWN),
        forced_spec("budget", prompt=[*range(40, 260)], kv_budget=budget),
        forced_spec("prompt", prompt=prompt[:9], prompt_logprobs=0),
        forced_spec("peer", prompt=prompt[:15], mode=Mode.PREFILL_ONLY),
    ]
    settings: dict[str, Any] = {"num_blocks": 600, "forced_max": 3}
    whole = drive_compiled(speaking(speaker, **settings), *specs)
    LATE[case](monkeypatch)
    delayed = drive_compiled(speaking(speaker, **settings), *specs)
    assert delayed.token_ids == whole.token_ids
    assert first_tokens(delayed) == first_tokens(whole)
    assert num_steps(delayed) > num_steps(whole)
    if case == "each misses its step":
        assert num_steps(delayed) > 1.5 * num_steps(whole)


def has_tokens(report: StepReport, sequence_id: str) -> bool:
    return any(new.sequence_id == sequence_id for new in report.new_tokens)


def test_a_mask_that_does_not_come_ends_its_sequence_alone(
    speaker: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third mask of one sequence is not made until the end; the other sequence goes on."""
    go_on, update = threading.Event(), GrammarMatcher.update

    def hold(matcher: GrammarMatcher) -> None:
        if matcher._token_ids[2:] and matcher is stuck.grammar:
            matcher.is_started = True
            go_on.wait(60)
        update(matcher)

    monkeypatch.setattr(GrammarMatcher, "update", hold)
    engine = speaking(speaker, forced_max=0)
    engine.add(forced_spec("stuck"))
    stuck = engine._sequences["stuck"]
    other = forced_spec("other", sampling=DRAWN, grammar=TEXT, max_tokens=30)
    try:
        outcome = drive_compiled(engine, other)
    finally:
        go_on.set()
    failed = [each for report in outcome.reports for each in report.failed]
    assert [(each.sequence_id, each.code) for each in failed] == [("stuck", "invalid_request")]
    assert "longer than 10 steps" in failed[0].message
    assert len(outcome.token_ids["stuck"]) == 3
    alone = drive_compiled(speaking(speaker, forced_max=0), other)
    assert outcome.token_ids["other"] == alone.token_ids["other"]
    end = next(n for n, report in enumerate(outcome.reports) if report.failed)
    last = max(n for n in range(end) if has_tokens(outcome.reports[n], "stuck"))
    assert any(has_tokens(report, "other") for report in outcome.reports[last + 1 : end])
    assert engine.stats().blocks_free + engine.load().blocks_cached == engine.load().blocks_total
