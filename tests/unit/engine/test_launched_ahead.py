"""Steps that are launched before the tokens of the step before are on the host: the order of work,
and the same tokens and blocks as without. test_engine_properties.py tries them in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.types import Mode
from tandem.models.folder import ModelFolder
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem.models.source import resolve
from tandem_kernels.sampling import Draw
from tests.engine_driver import Outcome, drive, drive_all, make_engine, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model
from tests.toy_runner import ToyRunner, ToyTokens, continuation
from tests.unit.engine.test_grammars import drive_compiled

PROMPT = [3, 1, 4, 1, 5]
EOS = 2


def make(**settings: Any) -> tuple[Engine, ToyRunner]:
    engine, runner = make_engine(**settings)
    runner.launches_ahead = True
    return engine, runner


def record(runner: ToyRunner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which each call of the runner adds a word."""
    calls: list[str] = []
    forward, start = runner.forward, runner.start_sampling

    def recorded_forward(
        batch: StepBatch, on_kv_written: Callable[[], object] | None
    ) -> torch.Tensor:
        calls.append("forward ahead" if batch.is_ahead else "forward")
        return forward(batch, on_kv_written)

    def recorded_start(
        logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> ToyTokens:
        calls.append("sample")
        tokens = start(logits, draws, rows)
        wait = tokens.wait

        def recorded_wait() -> list[int]:
            calls.append("wait")
            return wait()

        monkeypatch.setattr(tokens, "wait", recorded_wait)
        return tokens

    monkeypatch.setattr(runner, "forward", recorded_forward)
    monkeypatch.setattr(runner, "start_sampling", recorded_start)
    return calls


def test_the_next_pass_is_launched_before_the_wait_and_sampled_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = make()
    calls = record(runner, monkeypatch)
    outcome = drive_all(engine, make_spec("a", PROMPT, max_tokens=4))
    assert outcome.token_ids["a"] == continuation(PROMPT, 4)
    # The last token ends the sequence whichever it is, so nothing is launched before it is known.
    ahead = ["sample", "forward ahead", "wait"]
    assert calls == ["forward", *ahead, *ahead, *ahead, "sample", "wait"]


def test_a_stop_token_drops_the_token_that_was_computed_after_it() -> None:
    made = continuation(PROMPT, 8)
    stop = made[3]
    engine, _ = make()
    outcome = drive_all(
        engine,
        make_spec("stops", PROMPT, max_tokens=8, stop_token_ids=[stop]),
        make_spec("goes on", [9, 9], max_tokens=8),
    )
    assert outcome.token_ids["stops"] == made[: made.index(stop) + 1]
    assert outcome.ends["stops"].finish_reason == "stop"
    assert outcome.token_ids["goes on"] == continuation([9, 9], 8)
    assert engine.load().blocks_used == 0


def test_a_released_block_is_not_given_to_a_pull_before_the_pass_has_ended() -> None:
    """Each block that an import gets is overwritten at once, as by a pull."""
    engine, runner = make(num_blocks=6)
    engine.add(make_spec("removed", [7, 7, 7], max_tokens=9))
    engine.add(make_spec("stays", PROMPT, max_tokens=9))
    outcome = Outcome()
    while len(outcome.token_ids.get("removed", [])) < 2:
        outcome.take(engine.step())
    removed = set(engine.block_ids("removed"))
    engine.remove("removed")
    engine.check_integrity()
    engine.import_blocks("import", [bytes([n]) * 32 for n in range(6)])
    imported = set(engine.block_ids("import"))
    assert not imported & removed
    runner.scribble(sorted(imported))
    assert drive(engine, outcome).token_ids["stays"] == continuation(PROMPT, 9)
    engine.remove("import")
    assert engine.load().blocks_used == 0


def test_a_sequence_joins_and_a_pull_starts_without_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make()
    engine.add(make_spec("first", PROMPT, max_tokens=12))
    outcome = Outcome()
    outcome.take(engine.step())
    calls = record(runner, monkeypatch)
    joining = [6, 2, 8, 3, 1]
    engine.add(make_spec("joins", joining, max_tokens=5, mode=Mode.WAITING_FOR_REMOTE_KV))
    report = engine.step()
    outcome.take(report)
    assert not calls, "the report of the reserved blocks has to come first"
    (reserved,) = report.reserved
    runner.fill(engine.block_ids("joins"), joining, 0)
    assert len(reserved.block_ids) == 2
    outcome.take(engine.step())
    (token,) = continuation(joining, 1)
    engine.commit("joins", token)
    drive(engine, outcome)
    assert outcome.token_ids["first"] == continuation(PROMPT, 12)
    assert [token, *outcome.token_ids["joins"]] == continuation(joining, 5)
    assert "forward" not in calls, "every pass was launched ahead"


def test_log_probabilities_are_read_before_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make()
    calls = record(runner, monkeypatch)
    drive_all(engine, make_spec("a", PROMPT, sampling=SamplingParams(temperature=0, logprobs=2)))
    assert "forward ahead" not in calls


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, PreTrainedModel]:
    return make_tiny_model("mistral-wide-heads", tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("kernels", ["native", "torch", "triton"])
def test_a_model_draws_the_same_tokens(
    tiny: tuple[ModelFolder, PreTrainedModel], kernels: str
) -> None:
    """With penalties, banned words, a minimum of tokens and a grammar, which depend on the tokens
    of the step before."""
    num_tokens = 8 if kernels == "triton" else 30  # Triton's interpreter takes long
    text = grammar_text(StructuredOutput("x", "regex", "[a-f]{8}(-[0-9]{4}){3}"))
    edited = SamplingParams(
        temperature=1.5,
        seed=5,
        presence_penalty=0.7,
        min_tokens=5,
        bad_words_token_ids=[[9, 9], [7]],
        is_resolved=True,
    )
    outcomes = []
    for is_ahead in (False, True):
        compiler = GrammarCompiler(resolve("smollm2").path / "tokenizer.json", 203, (EOS,))
        engine, runner = make_model_engine(
            tiny[0], compiler, dtype="float32", kernels=kernels, block_size=4, num_blocks=128
        )
        runner.launches_ahead = is_ahead
        num_ahead = 0
        forward = runner.forward

        def counted(
            batch: StepBatch,
            on_kv_written: Callable[[], object] | None = None,
            forward: Any = forward,
        ) -> torch.Tensor:
            nonlocal num_ahead
            num_ahead += batch.is_ahead
            return forward(batch, on_kv_written)

        runner.forward = counted  # type: ignore[method-assign]
        outcome = drive_compiled(
            engine,
            make_spec("edited", [5, 9, 3], sampling=edited, max_tokens=num_tokens),
            make_spec(
                "grammar",
                [7, 8],
                sampling=edited,
                max_tokens=num_tokens,
                grammar=text,
                stop_token_ids=[EOS],
            ),
            make_spec("greedy", [4], max_tokens=num_tokens - 1),
        )
        outcomes.append(outcome.token_ids)
        assert (num_ahead > 3) == is_ahead
    assert outcomes[0] == outcomes[1]
