"""Requests of every kind to real models get the same tokens with and without speculation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tandem.common.adapter import Adapter
from tandem.common.kv_budget import KvBudget
from tandem.common.sampling_params import SamplingParams
from tandem.engine.cache.layout.kv_groups import INNER_CHUNK
from tandem.engine.engine import Engine
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.scheduler.schedule import Schedule
from tandem.engine.types import SequenceSpec, TokenLogprobs
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem.models.source import read_folder, resolve
from tests.engine_driver import GREEDY, Outcome, drive, drive_all, make_spec
from tests.lora_adapters import describe, write_adapter
from tests.model_engines import make_model_engine
from tests.scripted_drafts import AlwaysSpeculator, Oracle, speculate
from tests.tiny_models import make_random_speaker, make_tiny_model
from tests.unit.engine.tiny_runs import prefill_elsewhere, random_prompts, resumed, specs_of


def of_run(outcome: Outcome) -> dict[str, tuple[list[int], str]]:
    """The tokens of each sequence, and why it ended."""
    return {
        name: (tokens, outcome.ends[name].finish_reason)
        for name, tokens in outcome.token_ids.items()
    }


def logprobs_of(outcome: Outcome) -> dict[str, list[TokenLogprobs]]:
    found: dict[str, list[TokenLogprobs]] = {}
    for report in outcome.reports:
        for new in report.new_tokens:
            found.setdefault(new.sequence_id, []).extend(new.logprobs)
    return found


def recorded(made: dict[str, list[int]]) -> Oracle:
    """The tokens of an earlier run, without the last of each sequence."""

    def oracle(spec: SequenceSpec, token_ids: Sequence[int]) -> list[int]:
        return made[spec.sequence_id][len(token_ids) - spec.num_prompt_tokens : -1]

    return oracle


def speculating(engine: Engine, made: dict[str, list[int]], **more: Any) -> AlwaysSpeculator:
    """Lets an engine propose what an earlier run made, partly wrong."""
    speculator = AlwaysSpeculator(recorded(made), 203, **more)
    speculate(engine, speculator)
    return speculator


def drive_compiled(engine: Engine, specs: Sequence[SequenceSpec]) -> Outcome:
    for each in specs:
        engine.add(each)
    deadline = time.monotonic() + 600
    while engine.awaits_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    outcome = drive(engine)
    assert engine.load().blocks_used == 0
    return outcome


DRAWN = SamplingParams(temperature=1.2, top_p=0.95, seed=3)
PENALTIES = replace(
    DRAWN,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias={7: 3.0, 9: 2.0},
    seed=4,
)
# Sampling with few tokens, so that minimum length, stop tokens and bad words come into play.
BANS = replace(
    DRAWN, logit_bias=dict.fromkeys((20, 21, 22), 8.0), bad_words_token_ids=[[20, 21]], min_tokens=9
)
WORDS = grammar_text(StructuredOutput("x", "regex", r'("weather": (1|22|"x+"), ){3}[a-f ]{300}'))


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A tiny random model with a real vocabulary."""
    return make_random_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def adapter(speaker: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    path = tmp_path_factory.mktemp("adapter")
    write_adapter(path, speaker.config)
    return describe("adapter", path, speaker.config)


def of_every_kind(adapter: Adapter | None) -> list[SequenceSpec]:
    """Requests with each kind of sampling, and four answers to one prompt."""
    prompt = [5, 9, 11, 40, 41, 42, 43, 44, 45, 46]
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drawn": {"sampling": DRAWN},
        "penalties": {"sampling": PENALTIES},
        "bans": {"sampling": BANS, "stop_token_ids": [22]},
        "logprobs": {"sampling": replace(DRAWN, logprobs=2), "prompt_logprobs": 1},
        "grammar": {"sampling": replace(DRAWN, seed=9), "grammar": WORDS},
        "grammar and logprobs": {
            "sampling": replace(PENALTIES, seed=8, logprobs=1),
            "grammar": WORDS,
        },
    }
    if adapter is not None:
        kinds["adapter"] = {"sampling": replace(DRAWN, seed=6), "adapter": adapter}
    specs = [
        make_spec(name, [*prompt, at], max_tokens=40, **fields)
        for at, (name, fields) in enumerate(kinds.items())
    ]
    for at in range(4):
        sampling = replace(DRAWN, seed=50 + at)
        fork = "" if at == 0 else "answer 0"
        specs.append(
            make_spec(f"answer {at}", prompt, max_tokens=30, sampling=sampling, fork_of=fork)
        )
    return specs


NATIVE = {"kernels": "native"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {**NATIVE, "dtype": "float32", "numerics": "invariant"},
    "bf16": {**NATIVE, "dtype": "bfloat16"},
    "int8": {**NATIVE, "dtype": "bfloat16", "kv_dtype": "int8", "weights": "int8"},
    "torch": {"kernels": "torch", "dtype": "float32", "numerics": "invariant"},
}


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [
        *((name, 400) for name in SETTINGS),
        *(("fp32", 44), ("torch", 44)),
        *(pytest.param(name, 44, marks=pytest.mark.slow) for name in ("bf16", "int8")),
    ],
)
def test_every_kind_of_request_gets_the_same_tokens(
    name: str, num_blocks: int, speaker: ModelFolder, adapter: Adapter
) -> None:
    def make(num_blocks: int) -> Engine:
        compiler = GrammarCompiler.of(speaker)
        settings = {"block_size": 4, "num_blocks": num_blocks, **SETTINGS[name]}
        return make_model_engine(speaker, compiler, **settings)[0]

    specs = of_every_kind(adapter)
    plain = drive_compiled(make(400), specs)
    engine = make(num_blocks)
    speculator = speculating(engine, plain.token_ids)
    outcome = drive_compiled(engine, specs)
    assert of_run(outcome) == of_run(plain)
    assert logprobs_of(outcome) == logprobs_of(plain)
    assert speculator.stats.num_accepted_tokens > 50
    assert speculator.stats.num_draft_tokens - speculator.stats.num_accepted_tokens > 50
    assert len(outcome.reports) < len(plain.reports) or num_blocks < 400
    preemptions = max(end.num_preemptions for end in outcome.ends.values())
    assert (preemptions > 0) == (num_blocks < 400)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8_e4m3", "k8v4"])
@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "deepseek-v3", "mixtral"])
def test_models_of_other_kinds(
    family: str, kv_dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if family != "mistral-window" and kv_dtype != "float32":
        pytest.skip("one model with all kinds of KV suffices")
    folder, _ = make_tiny_model(family, tmp_path)
    settings = {"block_size": 4, "num_blocks": 400, "kernels": "native", "dtype": "float32"}
    specs = [
        make_spec(str(at), prompt, max_tokens=60, sampling=replace(DRAWN, seed=at))
        for at, prompt in enumerate(random_prompts(70, 33, 5))
    ]
    plain = drive_all(make_model_engine(folder, kv_dtype=kv_dtype, **settings)[0], *specs)
    engine, _ = make_model_engine(folder, kv_dtype=kv_dtype, **settings)
    speculator = speculating(engine, plain.token_ids)
    assert of_run(drive_all(engine, *specs)) == of_run(plain)
    assert speculator.stats.num_accepted_tokens > 20


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family",
    [
        "qwen3-next",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "kimi-linear",
                "granite4",
                "falcon-h1",
                "nemotron-h",
                "lfm2",
                "olmo-hybrid",
            )
        ),
    ],
)
def test_models_with_states(family: str, kernels: str, tmp_path: Path) -> None:
    folder, _ = make_tiny_model(family, tmp_path)
    settings = {
        "block_size": 16,
        "num_blocks": 100,
        "kernels": kernels,
        "dtype": "float32",
        "max_num_seqs": 6,
        "speculative_config": "auto",
    }
    if kernels == "torch":
        settings["numerics"] = "invariant"
    # There are more sequences than scratch slots, of which an engine has four.
    prompts = random_prompts(70, 33, 5, 20, 12, 9)
    specs = [
        make_spec(str(at), prompt, max_tokens=100, sampling=replace(DRAWN, seed=at))
        for at, prompt in enumerate(prompts)
    ]
    plain = drive_all(
        make_model_engine(folder, **settings | {"speculative_config": "off"})[0], *specs
    )
    engine, _ = make_model_engine(folder, **settings)
    speculator = speculating(engine, plain.token_ids, wrong=0.1)
    outcome = drive_all(engine, *specs)
    assert of_run(outcome) == of_run(plain)
    assert len(outcome.reports) < len(plain.reports)
    assert speculator.stats.num_accepted_tokens > 60
    assert speculator.stats.num_accepted_tokens < speculator.stats.num_draft_tokens
    # A further turn resumes after the states that were frozen meanwhile.
    made = plain.token_ids["0"]
    turn = make_spec("turn", [*prompts[0], *made, 5], max_tokens=20)
    again = drive_all(make_model_engine(folder, **settings)[0], turn)
    plain.token_ids["turn"] = again.token_ids["turn"]
    resumed_after = drive_all(engine, turn)
    assert resumed_after.token_ids == again.token_ids
    assert resumed_after.ends["turn"].num_cached_tokens == 128


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_states_beside_grammars_that_force_tokens(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long proposals, of which the accepted tokens are computed again together with forced ones.
    No chunk of an answer is an inner chunk, which kernels compute with other bits."""
    make_tiny_model("qwen3-next", tmp_path, vocab_size=49152)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(resolve("smollm2").path / name)
    folder = read_folder(tmp_path)
    settings = {"kernels": kernels, "numerics": "invariant", "num_blocks": 100, "max_num_seqs": 3}
    forced = ', "the name of the next river in the mountains of the north": '
    grammar = grammar_text(
        StructuredOutput("x", "regex", rf"([a-d]{{40}}{forced}){{3}}[a-f]{{900}}")
    )
    specs = [
        make_spec(
            str(at), prompt, max_tokens=150, sampling=replace(DRAWN, seed=at), grammar=grammar
        )
        for at, prompt in enumerate(random_prompts(30, 70))
    ]
    compiler = GrammarCompiler.of(folder)
    plain_engine, _ = make_model_engine(folder, compiler, **settings)
    plain = drive_compiled(plain_engine, specs)
    engine, runner = make_model_engine(folder, compiler, speculative_config="auto", **settings)

    def oracle(spec: SequenceSpec, token_ids: Sequence[int]) -> list[int]:
        """What was made, with the first token, which the grammar often allows, in some places."""
        made = plain.token_ids[spec.sequence_id]
        at = len(token_ids) - spec.num_prompt_tokens
        return [
            made[0] if place % 13 == 12 else token for place, token in enumerate(made[at:-1], at)
        ]

    speculator = AlwaysSpeculator(oracle, 203, wrong=0.0, tokens_max=64)
    speculate(engine, speculator)
    chunks: list[int] = []
    forward = runner.forward

    def count(batch: StepBatch, on_kv_written: Any) -> torch.Tensor:
        chunks.extend(one.num_tokens for one in batch.slices if one.context_len > 100)
        return forward(batch, on_kv_written)

    monkeypatch.setattr(runner, "forward", count)
    outcome = drive_compiled(engine, specs)
    assert of_run(outcome) == of_run(plain)
    stats = speculator.stats
    assert 60 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert len(outcome.reports) < len(plain.reports)
    assert 30 < max(chunks) < INNER_CHUNK


def test_a_moved_sequence_and_one_whose_prompt_a_peer_computed(speaker: ModelFolder) -> None:
    settings = {"numerics": "invariant", "block_size": 4, "kernels": "native"}

    def make() -> tuple[Engine, torch.Tensor]:
        engine, runner = make_model_engine(speaker, num_blocks=200, **settings)
        return engine, runner.pools[0].memory

    prompts = random_prompts(30, 17)
    specs = specs_of(prompts, 30)
    made = drive_all(make()[0], *specs).token_ids
    moved, _ = make()
    speculating(moved, made)
    rest = drive_all(moved, *resumed(specs, made, 7)).token_ids
    assert rest == {name: tokens[7:] for name, tokens in made.items()}
    here = make()
    speculator = speculating(here[0], made)
    outcome, _ = prefill_elsewhere(make(), here, lambda mode: specs_of(prompts, 30, mode))
    assert outcome.token_ids == made
    assert speculator.stats.num_accepted_tokens > 10


def test_a_repeated_text_takes_fewer_steps_and_an_engine_without_speculation_has_no_counts(
    speaker: ModelFolder,
) -> None:
    settings = {"numerics": "invariant", "kernels": "native", "num_blocks": 200}
    # With this bias, the answer repeats a few tokens.
    sampling = replace(GREEDY, logit_bias=dict.fromkeys((20, 21, 22), 50.0))
    spec = make_spec("a", [*range(60, 100)], max_tokens=100, sampling=sampling)
    plain_engine, _ = make_model_engine(speaker, **settings)
    plain = drive_all(plain_engine, spec)
    assert plain_engine.stats().speculation is None
    engine, _ = make_model_engine(speaker, speculative_config="auto", **settings)
    engine._speculator.num_worthwhile = lambda gains, work: len(gains)  # type: ignore[method-assign]
    outcome = drive_all(engine, spec)
    assert outcome.token_ids == plain.token_ids
    stats = engine.stats().speculation
    assert stats is not None
    assert len(outcome.reports) == len(plain.reports) - stats.num_accepted_tokens
    assert stats.num_accepted_tokens > 30
    assert sum(stats.num_accepted_at) == stats.num_accepted_tokens


def test_a_proposal_is_cut_at_the_first_token_that_the_grammar_forbids(
    speaker: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    add_drafts = Schedule.add_drafts

    def count(self: Schedule, place: int, drafts: Sequence[int]) -> None:
        computed.append(len(drafts))
        add_drafts(self, place, drafts)

    monkeypatch.setattr(Schedule, "add_drafts", count)
    text = grammar_text(StructuredOutput("x", "regex", "[a-f ]{40}"))
    engine = make_model_engine(
        speaker, GrammarCompiler.of(speaker), kernels="native", num_blocks=100
    )[0]
    forbidden = 12000  # a word with other letters

    def oracle(spec: SequenceSpec, token_ids: Sequence[int]) -> list[int]:
        return [forbidden] * 5 if len(token_ids) < 30 else []

    speculator = AlwaysSpeculator(oracle, 203, wrong=0.0)
    speculate(engine, speculator)
    drive_compiled(engine, [make_spec("a", [5, 9, 11], max_tokens=40, grammar=text)])
    assert computed == []


def test_a_sequence_with_a_kv_budget_does_not_speculate(speaker: ModelFolder) -> None:
    engine, _ = make_model_engine(speaker, num_blocks=100, speculative_config="auto")
    budgets = [None, KvBudget(tokens=40, sinks=5)]
    drafters = [
        engine._new_sequences.make(make_spec("a", [1, 2, 3], kv_budget=budget)).drafter
        for budget in budgets
    ]
    assert [drafter is None for drafter in drafters] == [False, True]


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("qwen3-next", {"state_dtype": "int8"}, "state-dtype is int8; it must be float32"),
        ("deepseek-v4", {}, "the model has compressed attention"),
    ],
)
def test_other_models_are_refused_before_weights_are_read(
    family: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder, _ = make_tiny_model(family, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    setting = '{"method": "ngram", "num_speculative_tokens": 4}'
    with pytest.raises(ConfigError, match=f"speculative-config is set, but {why}"):
        make_model_engine(folder, speculative_config=setting, **settings)
