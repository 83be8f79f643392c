"""A draft model changes the number of steps, not the tokens. It is used only as far as it pays."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from msgspec.structs import replace

from tandem.common.adapter import Adapter
from tandem.common.config.engine import EngineConfig
from tandem.common.perf_model.step_time import DraftPrice, StepWork
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.draft_model import DraftModel, Meter
from tandem.engine.executor.runner import HostTokens
from tandem.engine.memory import worker_need
from tandem.engine.speculation.acceptance import DRAFT_MODEL, Acceptance
from tandem.engine.speculation.draft_plan import (
    Candidate,
    DraftPlan,
    DraftRates,
    plan_drafts,
)
from tandem.engine.speculation.drafter import NOTHING
from tandem.engine.speculation.model_drafter import ModelDrafter
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.models.grammars.compiler import GrammarCompiler
from tandem_kernels.sampling import Draw
from tests.engine_driver import Outcome, drive, drive_all, make_spec
from tests.engine_machine import MAX_MODEL_LEN, EngineMachine
from tests.lora_adapters import describe, write_adapter
from tests.model_engines import make_model_engine
from tests.scripted_drafts import always_draft, draft_model_of
from tests.tiny_models import make_random_speaker, make_tiny_model
from tests.toy_runner import ToyRunner
from tests.unit.engine.test_speculation_models import SETTINGS as SETTINGS_OF
from tests.unit.engine.test_speculation_models import (
    drive_compiled,
    logprobs_of,
    of_every_kind,
)
from tests.unit.engine.tiny_runs import prefill_elsewhere, random_prompts, resumed, specs_of

DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=3)
SETTINGS: dict[str, Any] = {
    "kernels": "native",
    # The draft model computes with fast numerics, which are invariant only in float32.
    "dtype": "float32",
    "numerics": "invariant",
    "block_size": 4,
    "num_blocks": 200,
}


def setting(draft: ModelFolder | Path, num_tokens: int = 4) -> str:
    path = draft if isinstance(draft, Path) else draft.path
    given = {"method": "draft_model", "model": str(path), "num_speculative_tokens": num_tokens}
    return json.dumps(given)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return make_tiny_model("llama", tmp_path_factory.mktemp("target"))[0]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A draft model that predicts other tokens."""
    folder = tmp_path_factory.mktemp("stranger")
    return make_tiny_model("mistral-window", folder, head_dim=16, num_hidden_layers=1)[0]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A tiny random model with a real vocabulary."""
    return make_random_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def adapter(speaker: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    path = tmp_path_factory.mktemp("adapter")
    write_adapter(path, speaker.config)
    return describe("adapter", path, speaker.config)


def make(target: ModelFolder, draft: ModelFolder, **more: Any) -> Engine:
    engine, _ = make_model_engine(
        target, **(SETTINGS | {"speculative_config": setting(draft)} | more)
    )
    always_draft(engine)
    return engine


def tokens_of(outcome: Outcome) -> dict[str, tuple[list[int], str]]:
    return {
        name: (tokens, outcome.ends[name].finish_reason)
        for name, tokens in outcome.token_ids.items()
    }


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), DRAWN], ids=["greedy", "T1"])
def test_all_tokens_of_the_same_model_are_accepted(
    sampling: SamplingParams, target: ModelFolder
) -> None:
    specs = [
        make_spec(str(at), prompt, max_tokens=40, sampling=replace(sampling, seed=at))
        for at, prompt in enumerate(random_prompts(70, 5, 33))
    ]
    plain = drive_all(make_model_engine(target, **SETTINGS)[0], *specs)
    engine = make(target, target)
    outcome = drive_all(engine, *specs)
    assert tokens_of(outcome) == tokens_of(plain)
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 80
    assert len(outcome.reports) < len(plain.reports) / 2
    assert draft_model_of(engine).num_used_blocks == 0


@pytest.mark.parametrize(
    "name", ["fp32", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bf16", "int8", "torch"))]
)
@pytest.mark.parametrize("is_same", [True, False], ids=["same", "stranger"])
def test_every_kind_of_request_gets_the_same_tokens(
    name: str, is_same: bool, speaker: ModelFolder, adapter: Adapter, tmp_path: Path
) -> None:
    """Also with a pool that is too small, so that sequences are preempted."""
    specs = of_every_kind(adapter)
    settings = {"block_size": 4, **SETTINGS_OF[name]}

    def compiled(**more: Any) -> Engine:
        return make_model_engine(speaker, GrammarCompiler.of(speaker), **(settings | more))[0]

    plain = drive_compiled(compiled(num_blocks=400), specs)
    draft = speaker
    if not is_same:
        draft = make_random_speaker(tmp_path, num_hidden_layers=1)
    for num_blocks in (400, 44):
        engine = compiled(num_blocks=num_blocks, speculative_config=setting(draft))
        always_draft(engine)
        outcome = drive_compiled(engine, specs)
        assert tokens_of(outcome) == tokens_of(plain)
        assert logprobs_of(outcome) == logprobs_of(plain)
        stats = engine.stats().speculation
        assert stats is not None
        assert stats.num_draft_tokens > 50
        assert (stats.num_accepted_tokens > stats.num_draft_tokens / 2) == is_same
        engine.check_integrity()
        assert draft_model_of(engine).num_used_blocks == 0
        preemptions = max(end.num_preemptions for end in outcome.ends.values())
        assert (preemptions > 0) == (num_blocks < 400)


def test_a_pulled_prompt_and_a_moved_sequence(target: ModelFolder) -> None:
    """The draft model computes the prompt itself."""
    prompts = random_prompts(70, 17)
    specs = specs_of(prompts, 30)
    made = drive_all(make_model_engine(target, **SETTINGS)[0], *specs).token_ids
    producer, runner = make_model_engine(target, **SETTINGS)
    consumer, other = make_model_engine(
        target, **(SETTINGS | {"speculative_config": setting(target)})
    )
    always_draft(consumer)
    outcome, _ = prefill_elsewhere(
        (producer, runner.pools[0].memory),
        (consumer, other.pools[0].memory),
        lambda mode: specs_of(prompts, 30, mode),
    )
    assert outcome.token_ids == made
    stats = consumer.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    moved = make(target, target)
    rest = drive_all(moved, *resumed(specs, made, 7)).token_ids
    assert rest == {name: tokens[7:] for name, tokens in made.items()}
    assert draft_model_of(moved).num_used_blocks == 0


@pytest.mark.parametrize(
    ("family", "draft_family", "settings"),
    [
        ("qwen3-next", "llama", {"block_size": 16}),
        ("qwen3-next", "qwen3-next", {"block_size": 16}),
        pytest.param("llama", "granite4", {"block_size": 16}, marks=pytest.mark.slow),
        pytest.param("falcon-h1", "falcon-h1", {"block_size": 16}, marks=pytest.mark.slow),
        pytest.param("llama", "gemma3", {}, marks=pytest.mark.slow),
        pytest.param("llama", "deepseek-v3", {}, marks=pytest.mark.slow),
        pytest.param("llama", "gpt-oss", {}, marks=pytest.mark.slow),
        pytest.param("gemma3", "llama", {}, marks=pytest.mark.slow),
        pytest.param("llama", "llama", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(
            "llama", "llama", {"tensor_parallel": 2, "kernels": "torch"}, marks=pytest.mark.slow
        ),
    ],
)
def test_models_of_other_kinds(
    family: str, draft_family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    target, _ = make_tiny_model(family, tmp_path / "target")
    draft, _ = make_tiny_model(draft_family, tmp_path / "draft")
    specs = [
        make_spec(str(at), prompt, max_tokens=60, sampling=replace(DRAWN, seed=at))
        for at, prompt in enumerate(random_prompts(70, 33, 5))
    ]
    own = SETTINGS | settings
    one = own | {"tensor_parallel": 1}
    plain = drive_all(make_model_engine(target, **one)[0], *specs)
    engine, runner = make_model_engine(target, **(own | {"speculative_config": setting(draft)}))
    always_draft(engine)
    outcome = drive_all(engine, *specs)
    runner.close()
    assert tokens_of(outcome) == tokens_of(plain)
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_draft_tokens > 50
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (family == draft_family)
    assert draft_model_of(engine).num_used_blocks == 0


@pytest.mark.parametrize("family", ["mistral-window", "qwen3-next"])
def test_a_rejected_token_changes_no_later_proposal(family: str, tmp_path: Path) -> None:
    """Each third token of a proposal is a wrong one, and so all before it are accepted."""
    folder, _ = make_tiny_model(family, tmp_path, **({"head_dim": 16} if family[0] == "m" else {}))
    own = SETTINGS | {"block_size": 16}
    specs = [
        make_spec(str(at), prompt, max_tokens=60, sampling=replace(DRAWN, seed=at))
        for at, prompt in enumerate(random_prompts(70, 33, 5))
    ]
    plain = drive_all(make_model_engine(folder, **own)[0], *specs)
    engine, _ = make_model_engine(folder, **(own | {"speculative_config": setting(folder)}))
    always_draft(engine)
    draft = draft_model_of(engine)
    step = draft._step

    def step_wrong(rows: Any, guesses: dict[Any, list[int]], draws: Any) -> None:
        step(rows, guesses, draws)
        for guess in guesses.values():
            if len(guess) == 3:
                guess[2] = (guess[2] + 1) % 203

    draft._step = step_wrong  # type: ignore[method-assign]
    outcome = drive_all(engine, *specs)
    assert tokens_of(outcome) == tokens_of(plain)
    stats = engine.stats().speculation
    assert stats is not None
    # At the ends of states and answers, proposals have fewer than two tokens.
    assert stats.num_accepted_at[0] == stats.num_drafts > 40
    assert stats.num_accepted_at[1] > 0.8 * stats.num_drafts
    assert stats.num_accepted_at[2:] == [0, 0]
    assert draft.num_used_blocks == 0


def with_times(engine: Engine, *, draft_step: float) -> list[int]:
    """Gives the steps of an engine fixed times. A step of the draft model takes `draft_step` of one
    of the model. Returns the list to which each drafting adds the number of tokens so far."""
    engine._speculator.price = lambda work: DraftPrice(0.02, 0.001, 0.001)  # type: ignore[method-assign]
    draft = draft_model_of(engine)
    draft.rates = lambda step_s: DraftRates(  # type: ignore[method-assign]
        draft_step * step_s, 0.0, draft_step * step_s / 10
    )
    draft.clock = lambda: 0.0
    drafted: list[int] = []
    compute = draft._draft

    def count(depths: dict[Any, int]) -> None:
        drafted.append(next(iter(depths)).num_tokens)
        compute(depths)

    draft._draft = count  # type: ignore[method-assign]
    return drafted


def test_a_draft_model_that_gains_nothing_is_turned_off_within_32_steps(
    target: ModelFolder, stranger: ModelFolder
) -> None:
    [prompt, other] = random_prompts(40, 12)
    engine, _ = make_model_engine(
        target, **(SETTINGS | {"speculative_config": setting(stranger, 8)})
    )
    drafted = with_times(engine, draft_step=0.1)
    draft_model_of(engine)._trial_s = -10.0  # no trials
    spec = make_spec("0", prompt, max_tokens=300, sampling=DRAWN)
    outcome = drive_all(engine, spec)
    assert drafted
    assert max(drafted) < len(prompt) + 32
    # Later requests soon do not try it at all.
    for at in range(1, 9):
        drafted.clear()
        drive_all(engine, make_spec(str(at), other, max_tokens=30, sampling=DRAWN))
        assert len(drafted) < 4
    assert not drafted
    plain = drive_all(make_model_engine(target, **SETTINGS)[0], spec)
    assert tokens_of(outcome) == tokens_of(plain)


def test_a_draft_model_is_tried_again_and_used_if_it_gains(target: ModelFolder) -> None:
    [prompt] = random_prompts(40)
    engine, _ = make_model_engine(
        target, **(SETTINGS | {"speculative_config": setting(target, 8), "num_blocks": 400})
    )
    drafted = with_times(engine, draft_step=0.05)
    for _ in range(200):
        engine._speculator._acceptance.observe(0, is_accepted=False)
    outcome = drive_all(engine, make_spec("0", prompt, max_tokens=400, sampling=DRAWN))
    assert drafted[0] > len(prompt) + 20, "the first one is a trial"
    assert len(outcome.reports) < 350
    assert len(drafted) > 20


def test_times_decide_for_whom_the_draft_model_computes() -> None:
    def plan(candidates: Sequence[Candidate], *, num_sequences: int = 1, **more: Any) -> DraftPlan:
        given = {
            "price": DraftPrice(0.02, 0.001, 0.001),
            "rates": DraftRates(0.002, 0.0, 0.0002),
            "sequences_max": 4,
            "tokens_max": 64,
            "chunk_max": 256,
            "trial_s": 0.0,
        }
        return plan_drafts(candidates, num_sequences=num_sequences, **(given | more))

    good = Candidate(0.8, 1, 100, 8)
    bad = Candidate(0.05, 1, 100, 8)
    assert plan([]) == plan([bad]) == DraftPlan()
    assert plan([good])[:2] == ([0], 5)
    assert plan([bad, good])[0] == [1]
    assert plan([bad, good], num_sequences=2)[0] == [1]
    # In a large batch, a step with further tokens costs more than they are worth.
    assert not plan([good], num_sequences=32).drafted
    assert plan([good] * 4, tokens_max=8)[:2] == ([0, 1, 2, 3], 2)
    assert plan([bad, good, good], sequences_max=1)[0] == [1]
    # A prompt of 1,000 tokens takes 0.2 s.
    behind = good._replace(num_missing=1000)
    assert plan([behind]).caught_up == 0
    assert plan([behind])[3] == 100, "the step takes at most twice as long"
    assert plan([behind._replace(num_left=5)]).caught_up is None
    assert plan([bad, behind, behind._replace(num_missing=500)]).caught_up == 2
    assert plan([good, behind])[:3] == ([0], 5, 1)
    # The target for the time between two tokens.
    tight = DraftPrice(0.02, 0.001, 0.001, most_s=0.004)
    assert plan([good], price=tight)[:2] == ([0], 1)
    assert plan([behind], price=tight).chunk_tokens == 20
    # Trials.
    assert plan([bad], trial_s=0.02) == DraftPlan([0], 8, is_trial=True)
    assert plan([bad._replace(num_missing=50)], trial_s=0.02) == DraftPlan()
    trial = plan([bad._replace(num_missing=50)], trial_s=0.03)
    assert (trial.caught_up, trial.is_trial) == (0, True)


@pytest.mark.parametrize("has_states", [False, True])
def test_a_sequence_that_got_no_token_gets_the_same_proposal_again_or_none(
    has_states: bool, target: ModelFolder, stranger: ModelFolder, tmp_path: Path
) -> None:
    """A draft model with states proposes nothing, because its states have the last token."""
    draft = make_tiny_model("qwen3-next", tmp_path)[0] if has_states else stranger
    engine = make(target, draft)
    [prompt] = random_prompts(70)
    engine.add(make_spec("0", prompt, max_tokens=60, sampling=DRAWN))
    while not engine._sequences or engine._sequences["0"].num_tokens < 90:
        engine.step()
    sequence = engine._sequences["0"]
    drafter = sequence.drafter
    assert isinstance(drafter, ModelDrafter)
    proposals = []
    for _ in range(2):
        drafter.put(sequence.token_ids, [])
        work = StepWork(decode_tokens=1)
        draft_model_of(engine).prepare([sequence], work, sequences_max=1, tokens_max=64)
        proposals.append(drafter.propose(sequence.token_ids))
    assert len(proposals[0].token_ids) == 4
    assert proposals[1] == (NOTHING if has_states else proposals[0])
    drive(engine)
    engine.check_integrity()
    assert draft_model_of(engine).num_used_blocks == 0


def test_a_few_slow_steps_do_not_end_the_use_of_a_draft_model() -> None:
    meter = Meter((0.2,))
    assert meter.coefficients(0.05) == (0.2 * 0.05,)
    for _ in range(8):  # the first one does not count
        meter.observe((1.0,), 1.0)
        assert meter.coefficients(0.05) == (0.2 * 0.05,)
    meter.observe((1.0,), 1.0)
    assert meter.coefficients(0.05) == pytest.approx((1.0,))
    quick = Meter((0.2,))
    for _ in range(3):
        quick.observe((1.0,), 0.001)
    assert quick.coefficients(0.05) == pytest.approx((0.001,))


def test_a_wrong_stop_token_counts_as_a_rejected_one() -> None:
    spec = make_spec("0", [1, 2], max_tokens=20, stop_token_ids=[9])
    drafter = ModelDrafter(Acceptance(assumed=DRAFT_MODEL), spec, 100)
    drafter.put([1, 2], [3, 9, 4])
    assert drafter.propose([1, 2]).token_ids == [3]
    before = drafter.probability
    assert drafter.awaits_tokens([1, 2, 3])
    assert drafter.propose([1, 2, 3]).token_ids == []
    assert drafter.probability > before
    assert not drafter.awaits_tokens([1, 2, 3, 5])
    assert drafter.probability < before
    assert drafter.propose([1, 2, 3, 5]).token_ids == []


@pytest.mark.parametrize("change", ["vocabulary", "size", "compressed", "missing"])
def test_other_draft_models_are_refused_before_weights_are_read(
    change: str, target: ModelFolder, tmp_path: Path
) -> None:
    family = "deepseek-v4" if change == "compressed" else "llama"
    more = {"vocab_size": 201} if change == "size" else {}
    draft, _ = make_tiny_model(family, tmp_path / "draft", **more)
    (draft.path / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    if change == "vocabulary":
        file = draft.path / "tokenizer.json"
        file.write_text(file.read_text().replace('"A":', '"\u00e4":'))
    path = tmp_path / "none" if change == "missing" else draft.path
    why = {
        "vocabulary": "its vocabulary is another one: token 33 is 'ä', and 'A' in the model",
        "size": "its vocab_size is 201; it must be that of the model, 203",
        "compressed": "it has compressed attention",
        "missing": "the draft model of speculative-config: .*none is not a model",
    }[change]
    with pytest.raises(ConfigError, match=why):
        make_model_engine(target, **(SETTINGS | {"speculative_config": setting(path)}))


def test_the_memory_check_counts_the_draft_model(
    target: ModelFolder, stranger: ModelFolder
) -> None:
    config = EngineConfig(model="", **(SETTINGS | {"speculative_config": setting(stranger)}))
    alone = worker_need(config, target)
    both = worker_need(config, target, draft=stranger)
    engine, _ = make_model_engine(target, **(SETTINGS | {"speculative_config": setting(stranger)}))
    draft = draft_model_of(engine)
    assert (both.num_bytes, alone.draft_bytes) == (alone.num_bytes, 0)
    assert both.draft_bytes > draft._kv.layout.pool_bytes
    assert draft._kv.layout.most_blocks == engine.layout.most_blocks


class HalfWrong(ToyRunner):
    """A draft model that predicts what the toy model samples, or another token."""

    rng = random.Random(0)
    wrong = 0.0

    def start_sampling(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> Any:
        tokens = super().start_sampling(logits, draws, rows).wait()
        return HostTokens(
            [self.rng.randrange(16) if self.rng.random() < self.wrong else each for each in tokens]
        )


class Machine(EngineMachine):
    """All calls in any order, while a draft model proposes tokens."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 20),
        max_num_seqs=st.integers(1, 4),
        max_tokens_per_step=st.integers(1, 24),
        seed=st.integers(0, 1 << 16),
        wrong=st.sampled_from([0.0, 0.2, 0.7]),
        num_draft_blocks=st.integers(1, 20),
    )
    def start(
        self, *, seed: int, wrong: float, num_draft_blocks: int, block_size: int, **more: Any
    ) -> None:
        self.draft = HalfWrong(block_size=block_size, max_model_len=MAX_MODEL_LEN - 2)
        self.draft.rng, self.draft.wrong = random.Random(seed), wrong
        super().start(block_size=block_size, launches_ahead=False, **more)
        # A pool that is smaller than that of the model.
        self.engine._draft_model = self.engine._scheduler._draft_model = DraftModel(
            self.draft, self.engine._config, self.engine._speculator, num_draft_blocks
        )
        always_draft(self.engine)

    def settings(self, block_size: int) -> dict[str, Any]:
        return {"speculative_config": setting(Path("toy")), "draft": self.draft}

    def teardown(self) -> None:
        super().teardown()
        assert draft_model_of(self.engine).num_used_blocks == 0


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = pytest.mark.timeout(300)(Machine.TestCase)
