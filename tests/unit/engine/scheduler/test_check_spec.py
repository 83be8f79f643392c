"""Admission to an engine with 4 blocks of 4 tokens and a context of 12, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.sampling_params import SamplingParams
from tandem.engine.image_rows import ImageRows
from tandem.engine.scheduler.check_spec import check_spec
from tandem.engine.types import Mode
from tandem.errors import BadRequest, ContextTooLong, NeverFits
from tests.engine_driver import make_spec
from tests.toy_runner import ToyRunner

PROMPT = [1, 2, 3, 4, 5, 6]


def check(
    token_ids: list[int], *, num_blocks: int = 4, max_model_len: int = 12, **fields: Any
) -> None:
    layout = ToyRunner(block_size=4).layout(num_blocks)
    spec = make_spec("a", token_ids, **fields)
    check_spec(
        spec,
        layout=layout,
        max_model_len=max_model_len,
        vocab_size=100,
        check_adapter=lambda _: None,
        check_images=ImageRows(None).check,
    )


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    check(list(range(11)))
    with pytest.raises(ContextTooLong, match=r"12 tokens; .* at most 11") as caught:
        check(list(range(12)))
    assert caught.value.param == "prompt"


def test_an_id_that_the_model_has_no_embedding_of_is_refused() -> None:
    check([0, 99])
    for wrong in (100, -1, 1 << 31):
        with pytest.raises(BadRequest, match="the model's token ids are from 0 to 99") as caught:
            check([0, wrong])
        assert caught.value.param == "prompt"


def test_a_moved_sequence_may_be_at_the_end_of_the_context_and_not_beyond() -> None:
    check(list(range(12)), num_prompt_tokens=6)
    with pytest.raises(ContextTooLong):
        check(list(range(13)), num_prompt_tokens=6)


def test_prompt_and_max_tokens_must_fit_the_whole_pool() -> None:
    check(PROMPT, num_blocks=2, max_tokens=2)
    with pytest.raises(NeverFits, match=r"6 tokens with max_tokens 3 .* 8 tokens") as caught:
        check(PROMPT, num_blocks=2, max_tokens=3)
    assert caught.value.param == "max_tokens"


def test_the_context_bounds_what_max_tokens_can_take() -> None:
    check(PROMPT, num_blocks=3, max_tokens=1000)


def test_for_a_peer_only_the_prompt_must_fit() -> None:
    check(list(range(8)), num_blocks=2, mode=Mode.PREFILL_ONLY, max_tokens=100)
    with pytest.raises(NeverFits, match=r"9 tokens, .* holds only 8 tokens \(2 blocks of 4\)"):
        check(list(range(9)), num_blocks=2, mode=Mode.PREFILL_ONLY)


@pytest.mark.parametrize(
    ("token_ids", "fields"),
    [
        ([], {}),
        ([1], {"num_prompt_tokens": 0}),
        ([1], {"num_prompt_tokens": 2}),
        ([-1], {}),
        ([1 << 32], {}),
        ([1], {"max_tokens": 0}),
    ],
)
def test_nonsense(token_ids: list[int], fields: dict[str, int]) -> None:
    with pytest.raises(BadRequest):
        check(token_ids, **fields)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e38])
def test_a_number_that_no_draw_can_compute_is_refused(name: str, value: float) -> None:
    with pytest.raises(BadRequest, match=f"{name} is .*; it must be from ") as caught:
        check([1], sampling=SamplingParams(**{name: value}, is_resolved=True))
    assert caught.value.param == name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e38, 1e38])
def test_an_edit_that_makes_a_logit_infinite_is_refused(value: float) -> None:
    sampling = [
        SamplingParams(presence_penalty=value, is_resolved=True),
        SamplingParams(frequency_penalty=value, is_resolved=True),
        SamplingParams(logit_bias={5: 1.0, 6: value}, is_resolved=True),
    ]
    for one in sampling:
        with pytest.raises(BadRequest, match="it must be from -1e\\+06 to 1e\\+06"):
            check([1], sampling=one)
