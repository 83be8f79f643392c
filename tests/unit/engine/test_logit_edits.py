"""Edits and log probabilities of whole sequences, on all kinds of kernels and when preempted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.logit_edits import logit_edits
from tandem.engine.types import Mode, SequenceSpec, TokenLogprobs
from tandem.models.folder import ModelFolder
from tests.engine_driver import Outcome, drive_all, make_engine, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model

# More tokens than a step's rows of prompt logits, and more different ones than first have a place.
PROMPT = [5, 9, 5, 17, 100, *range(150)]
EVERYTHING = SamplingParams(
    temperature=0.7,
    seed=11,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.3,
    logit_bias={40: 3.0, 41: -100.0},
    min_tokens=6,
    bad_words_token_ids=[[7], [50, 51]],
    logprobs=3,
)
STOPS = [60, 61]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, PreTrainedModel]:
    """A tiny random model in fp32, and transformers' own."""
    return make_tiny_model("mistral-wide-heads", tmp_path_factory.mktemp("tiny"))


def make(tiny: tuple[ModelFolder, PreTrainedModel], **settings: Any) -> Engine:
    settings = {"kernels": "torch", "block_size": 4, "num_blocks": 128, **settings}
    return make_model_engine(tiny[0], dtype="float32", **settings)[0]


def everything(sequence_id: str, prompt: list[int] = PROMPT, **fields: Any) -> SequenceSpec:
    return make_spec(
        sequence_id,
        prompt,
        **{
            "sampling": EVERYTHING,
            "prompt_logprobs": 2,
            "stop_token_ids": STOPS,
            "max_tokens": 24,
            **fields,
        },
    )


def logprobs_of(outcome: Outcome, sequence_id: str) -> tuple[list[Any], list[Any]]:
    """Returns all log probabilities of a prompt and of what followed it."""
    news = [n for r in outcome.reports for n in r.new_tokens if n.sequence_id == sequence_id]
    return (
        [one for new in news for one in new.prompt_logprobs],
        [one for new in news for one in new.logprobs],
    )


def assert_as_transformers(
    model: PreTrainedModel, token_ids: list[int], found: list[TokenLogprobs]
) -> None:
    """`found` are of the last tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0].double()
    expected = torch.log_softmax(logits, -1)
    for position, one in enumerate(found, len(token_ids) - len(found)):
        row, token_id = expected[position - 1], token_ids[position]
        assert one.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert one.rank == 1 + int((row > row[token_id]).sum())
        top = row.topk(len(one.top_ids))
        assert one.top_ids == top.indices.tolist()
        assert one.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "native", "triton"])
def test_every_kind_of_kernels_edits_and_measures_alike(
    tiny: tuple[ModelFolder, PreTrainedModel], kernels: str
) -> None:
    # The interpreter of Triton takes long.
    prompts = {"a": PROMPT[: 12 if kernels == "triton" else None], "b": PROMPT[:7]}
    max_tokens = 7 if kernels == "triton" else 24
    specs = [everything(name, prompt, max_tokens=max_tokens) for name, prompt in prompts.items()]
    outcome = drive_all(make(tiny, kernels=kernels), *specs)
    for sequence_id, prompt in prompts.items():
        made = outcome.token_ids[sequence_id]
        of_prompt, of_output = logprobs_of(outcome, sequence_id)
        assert len(of_prompt) == len(prompt) - 1
        assert len(of_output) == len(made)
        assert_as_transformers(tiny[1], prompt + made, of_prompt + of_output)
        assert not set(made[:5]) & set(STOPS)
        assert not {7, 41} & set(made)
        assert all(pair != (50, 51) for pair in pairwise(made))


def test_a_preempted_sequence_goes_on_with_its_edits(
    tiny: tuple[ModelFolder, PreTrainedModel],
) -> None:
    whole = drive_all(make(tiny, kernels="native"), everything("a"), everything("b", PROMPT[:9]))
    short = make(tiny, kernels="native", num_blocks=49)  # of 45 and 9
    outcome = drive_all(short, everything("a"), everything("b", PROMPT[:9]))
    assert max(end.num_preemptions for end in outcome.ends.values()) > 0
    assert outcome.token_ids == whole.token_ids
    for sequence_id in ("a", "b"):
        for found, expected in zip(
            logprobs_of(outcome, sequence_id), logprobs_of(whole, sequence_id), strict=True
        ):
            assert [one.top_ids for one in found] == [one.top_ids for one in expected]
            assert [one.logprob for one in found] == pytest.approx(
                [one.logprob for one in expected], abs=1e-5
            )


def test_a_moved_sequence_goes_on_with_its_edits(
    tiny: tuple[ModelFolder, PreTrainedModel],
) -> None:
    engine = make(tiny, kernels="native")
    whole = drive_all(engine, everything("a"))
    made = whole.token_ids["a"]
    assert len(made) > 10
    moved = everything("b", PROMPT + made[:10], num_prompt_tokens=len(PROMPT))
    outcome = drive_all(engine, moved)
    assert outcome.token_ids["b"] == made[10:]
    of_prompt, of_output = logprobs_of(outcome, "b")
    assert of_prompt == []  # the router has them since the first token
    assert [one.top_ids for one in of_output] == [
        one.top_ids for one in logprobs_of(whole, "a")[1][10:]
    ]


def test_a_cached_prompt_is_computed_anew_for_its_log_probabilities(
    tiny: tuple[ModelFolder, PreTrainedModel],
) -> None:
    engine = make(tiny, kernels="native")
    first = drive_all(engine, everything("a"))
    again = drive_all(engine, everything("b"), everything("c", prompt_logprobs=None))
    assert logprobs_of(again, "b") == logprobs_of(first, "a")
    assert again.ends["b"].num_cached_tokens == 0
    assert again.ends["c"].num_cached_tokens > 0
    assert logprobs_of(again, "c")[0] == []


def test_a_step_has_few_rows_of_prompt_logits() -> None:
    engine, _ = make_engine(num_blocks=400, max_tokens_per_step=400)
    specs = [
        make_spec(name, [3] * 100, prompt_logprobs=1, max_tokens=1) for name in ("a", "b", "c")
    ]
    outcome = drive_all(engine, *specs)
    assert max(report.num_prefill_tokens for report in outcome.reports) == 128
    for name in ("a", "b", "c"):
        assert len(logprobs_of(outcome, name)[0]) == 99


def test_a_prefilled_prompt_has_its_log_probabilities_for_the_consumer() -> None:
    engine, _ = make_engine()
    sampling = SamplingParams(temperature=0, logprobs=0)
    spec = make_spec("a", [3, 4, 5], mode=Mode.PREFILL_ONLY, sampling=sampling, prompt_logprobs=0)
    (told,) = [p for report in drive_all(engine, spec).reports for p in report.prefilled]
    assert told.logprobs is not None
    assert told.logprobs.top_ids == []
    assert len(told.prompt_logprobs) == 2
    engine.remove("a")


class TestEdits:
    """The edit of a sequence, token by token."""

    def edits_of(self, sampling: SamplingParams, token_ids: list[int], num_prompt: int) -> Any:
        spec = make_spec(
            "a", token_ids, num_prompt_tokens=num_prompt, sampling=sampling, stop_token_ids=[2, 99]
        )
        return logit_edits(spec, vocab_size=50)

    def test_nothing_asked_is_no_edit(self) -> None:
        assert self.edits_of(SamplingParams(temperature=1.0, logprobs=3), [1, 2], 1) is None

    def test_penalties_count_the_completion_and_repetition_the_prompt_too(self) -> None:
        sampling = SamplingParams(
            presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0
        )
        edits = self.edits_of(sampling, [4, 5, 5, 5], 2)
        edits.append(6)
        edit = edits.edit()
        assert edit.token_ids.tolist() == [4, 5, 6]
        assert edit.scales.tolist() == [2.0, 2.0, 2.0]
        assert edit.penalties.tolist() == [0.0, 1.0, 0.75]

    def test_min_tokens_bans_what_stops_until_so_many_are_made(self) -> None:
        edits = self.edits_of(SamplingParams(temperature=0, min_tokens=2), [4, 5], 1)
        assert edits.edit().banned == [2]  # the model has no token 99
        edits.append(6)
        assert edits.edit() is None

    def test_the_last_token_of_a_bad_run_is_banned_after_the_others(self) -> None:
        edits = self.edits_of(
            SamplingParams(temperature=0, bad_words_token_ids=[[7], [8, 9, 10]]), [8, 9], 2
        )
        assert edits.edit().banned == [7]  # the prompt may have it
        for token_id, banned in ((8, [7]), (9, [7, 10]), (9, [7])):
            edits.append(token_id)
            assert edits.edit().banned == banned
