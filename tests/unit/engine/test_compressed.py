"""Sequences of a model with compressed attention give the tokens of transformers, whether their KV
is computed, cached, copied or pulled. The compressors of the tiny model make entries of 4 and of 32
tokens, and its window has 40 tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.common.kv_budget import KvBudget
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode
from tandem.errors import BadRequest, ConfigError
from tandem.models.folder import ModelFolder
from tests.engine_driver import Outcome, drive_all, make_spec
from tests.model_engines import make_model_engine, make_runner
from tests.tiny_models import make_tiny_model
from tests.unit.engine.test_states import Oracle
from tests.unit.engine.tiny_runs import specs_of

NUM_TOKENS = 20
_WITH_LOGPROBS = SamplingParams(temperature=0, logprobs=1)
_PROMPT = torch.randint(0, 203, (300,), generator=torch.Generator().manual_seed(1)).tolist()
# The groups of the pools: entries, inputs of entries of 4 and of 32 tokens, and the window.
ENTRIES, WINDOW, INPUTS_OF_4, INPUTS_OF_32 = range(4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, Oracle]:
    folder, model = make_tiny_model("deepseek-v4", tmp_path_factory.mktemp("model"))
    return folder, Oracle(model)


def logprobs_of(outcome: Outcome) -> torch.Tensor:
    """Returns the log probability of each token, or other numbers if tokens differ."""
    news = [new for report in outcome.reports for new in report.new_tokens]
    return torch.tensor([each.logprob for new in news for each in new.logprobs])


def make(folder: ModelFolder, **settings: Any) -> tuple[Engine, ModelRunner]:
    settings = {"num_blocks": 100, "max_num_seqs": 4, "max_tokens_per_step": 100} | settings
    return make_model_engine(folder, **({"dtype": "float32", "block_size": 16} | settings))


@pytest.mark.parametrize(
    ("tokens_per_step", "block_size", "kernels"),
    [(7, 16, "native"), (100, 8, "native"), (64, 64, "native"), (64, 16, "torch")],
)
def test_a_prompt_resumes_at_each_token(
    tiny: tuple[ModelFolder, Oracle], tokens_per_step: int, block_size: int, kernels: str
) -> None:
    folder, oracle = tiny
    settings = {"max_tokens_per_step": tokens_per_step, "block_size": block_size}
    engine, _ = make(folder, **settings, kernels=kernels)
    num_cached = 192 if block_size == 64 else 200  # The answer fills the last block of the others.
    assert oracle.check(engine, _PROMPT[:200]) == [0]
    assert oracle.check(engine, _PROMPT[:200]) == [min(199, num_cached)]
    assert oracle.check(engine, [*_PROMPT[:101], 5, 6]) == [101]  # copies a part of a block
    assert oracle.check(engine, _PROMPT[:250]) == [num_cached]
    assert engine.load().blocks_used == 0


def test_steps_of_single_tokens(tiny: tuple[ModelFolder, Oracle]) -> None:
    folder, oracle = tiny
    engine, _ = make(folder, max_tokens_per_step=1)
    assert oracle.check(engine, _PROMPT[:70]) == [0]


@pytest.mark.parametrize("group", [None, ENTRIES, WINDOW, INPUTS_OF_4, INPUTS_OF_32])
def test_what_is_cached_in_each_group_is_needed(
    tiny: tuple[ModelFolder, Oracle], group: int | None
) -> None:
    """The second prompt resumes inside a run of each compressor, and these runs end in it."""
    folder, _ = tiny
    engine, runner = make(folder)
    drive_all(engine, make_spec("0", _PROMPT[:243], max_tokens=NUM_TOKENS))
    prompt = [*_PROMPT[:242], *range(40)]
    spec = make_spec("1", prompt, max_tokens=NUM_TOKENS, sampling=_WITH_LOGPROBS)
    expected = logprobs_of(drive_all(make(folder)[0], spec))
    if group is not None:
        runner.pools[group].memory.zero_()
    warm = drive_all(engine, spec)
    assert warm.ends["1"].num_cached_tokens == 242
    made = logprobs_of(warm)
    is_same = made.shape == expected.shape and torch.allclose(made, expected, atol=1e-4)
    assert is_same is (group is None)


def test_preempted_sequences(tiny: tuple[ModelFolder, Oracle]) -> None:
    folder, oracle = tiny
    engine, _ = make(folder, num_blocks=14)
    prompts = [_PROMPT[:100], _PROMPT[100:210], _PROMPT[50:160]]
    specs = [make_spec(f"{i}", prompt, max_tokens=60) for i, prompt in enumerate(prompts)]
    outcome = drive_all(engine, *specs)
    for spec in specs:
        expected = oracle.tokens(tuple(spec.token_ids), 60)
        assert outcome.token_ids[spec.sequence_id] == expected
    assert sum(end.num_preemptions for end in outcome.ends.values()) > 0


def test_forks(tiny: tuple[ModelFolder, Oracle]) -> None:
    folder, oracle = tiny
    engine, _ = make(folder)
    prompt = _PROMPT[:107]
    specs = [
        make_spec(name, prompt, max_tokens=NUM_TOKENS, fork_of="" if name == "0" else "0")
        for name in "0123"
    ]
    outcome = drive_all(engine, *specs)
    assert list(outcome.token_ids.values()) == [oracle.tokens(tuple(prompt), NUM_TOKENS)] * 4


@pytest.mark.parametrize("destroyed", [None, ENTRIES, WINDOW, INPUTS_OF_4, INPUTS_OF_32])
def test_what_is_pulled_of_each_group_is_needed(
    tiny: tuple[ModelFolder, Oracle], destroyed: int | None
) -> None:
    folder, oracle = tiny
    (there, far_runner), (here, runner) = make(folder), make(folder)
    prompt = _PROMPT[:150]
    fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "sampling": _WITH_LOGPROBS}
    expected = drive_all(make(folder)[0], make_spec("a", prompt, **fields))
    here.add(make_spec("a", prompt, mode=Mode.WAITING_FOR_REMOTE_KV, **fields))
    (reserved,) = here.step().reserved
    lease = drive_all(there, make_spec("a", prompt, mode=Mode.PREFILL_ONLY))
    sent = [i for report in lease.reports for run in report.final_blocks for i in run.block_ids]
    for source, target in zip(sent, reserved.block_ids, strict=True):
        if here.layout.locate(target)[0] != destroyed:
            to, at = here.layout.spans.span(target), there.layout.spans.span(source)
            runner.kv[to] = far_runner.kv[at]
    (prefilled,) = [one for report in lease.reports for one in report.prefilled]
    here.commit("a", prefilled.first_token_id)
    outcome = drive_all(here)
    right, made_here = logprobs_of(expected)[1:], logprobs_of(outcome)
    is_same = made_here.shape == right.shape and torch.allclose(made_here, right, atol=1e-4)
    assert is_same is (destroyed is None)
    if destroyed is None:
        made = [prefilled.first_token_id, *outcome.token_ids["a"]]
        assert made == oracle.tokens(tuple(prompt), NUM_TOKENS)
    there.remove("a")
    assert there.load().blocks_used == here.load().blocks_used == 0


def test_small_blocks_and_other_dtypes_are_refused(tiny: tuple[ModelFolder, Oracle]) -> None:
    for settings, message in [
        ({"block_size": 24}, "block-size is 24; for this model it must be a multiple or a divisor"),
        ({"kv_dtype": "int8"}, "the KV dtype int8 is not supported for this model"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_runner(tiny[0], **settings)


def test_a_kv_budget_is_refused(tiny: tuple[ModelFolder, Oracle]) -> None:
    engine, _ = make(tiny[0])
    (spec,) = specs_of([_PROMPT], NUM_TOKENS, Mode.LOCAL, budget=KvBudget(64, 4))
    with pytest.raises(BadRequest, match="the model has compressed attention"):
        engine.add(spec)
