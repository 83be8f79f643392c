from __future__ import annotations

from typing import Any

import pytest

from tandem.api.openai.replies import Replies
from tandem.api.openai.requests import parse_chat, parse_completion
from tandem.router.request.delta import Delta, Usage

FIRST = Delta("he", [5], Usage(3, 1, 2), prompt_token_ids=[1, 2, 3])
LAST = Delta("y", [6, 7], Usage(3, 3, 2), finish_reason="length", total=Usage(3, 3, 2))
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def replies(*, chat: bool, **body: Any) -> Replies:
    if chat:
        messages = [{"role": "user", "content": "x"}]
        return Replies(parse_chat({"messages": messages, **body}, "id"), "m")
    return Replies(parse_completion({"prompt": "x", **body}, "id"), "m")


def streamed(*, chat: bool, **body: Any) -> list[dict[str, Any]]:
    output_token_ids = replies(chat=chat, stream=True, **body)
    return [chunk for delta in (FIRST, LAST) for chunk in output_token_ids.chunks(0, delta)]


@pytest.mark.parametrize("chat", [False, True])
def test_usage_comes_last_and_only_when_asked_for(chat: bool) -> None:
    without = streamed(chat=chat)
    assert all("usage" not in c for c in without)
    chunks = streamed(chat=chat, stream_options={"include_usage": True})
    assert len(chunks) == len(without) + 1
    assert [c["usage"] for c in chunks] == [None] * len(without) + [USAGE]
    assert chunks[-1]["choices"] == []
    assert {c["id"] for c in chunks} == {"chatcmpl-id" if chat else "cmpl-id"}


@pytest.mark.parametrize("chat", [False, True])
def test_each_chunk_has_the_usage_so_far_when_that_is_asked_for(chat: bool) -> None:
    """The behaviour is vLLM's: the final usage follows, and without include_usage there is none."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(chat=chat, stream_options=options)
    output_token_ids = [c["usage"]["completion_tokens"] for c in chunks]
    assert output_token_ids == [*([0] if chat else []), 1, 3, 3]
    assert {c["usage"]["prompt_tokens"] for c in chunks} == {3}
    assert chunks[-1]["choices"] == []
    without = streamed(chat=chat, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in c for c in without)


def test_a_chat_begins_with_its_role() -> None:
    deltas = [c["choices"][0]["delta"] for c in streamed(chat=True)]
    assert [d.pop("reasoning_content") for d in deltas] == [None, None, None]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "he"}, {"content": "y"}]
    reasons = [c["choices"][0]["finish_reason"] for c in streamed(chat=True)]
    assert reasons == [None, None, "length"]


def test_token_ids_are_where_vllm_has_them() -> None:
    chunks = streamed(chat=False, return_token_ids=True)
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[5], [6, 7]]
    assert [c["choices"][0].get("prompt_token_ids") for c in chunks] == [[1, 2, 3], None]
    chunks = streamed(chat=True, return_token_ids=True)
    assert [c["choices"][0].get("token_ids") for c in chunks] == [None, [5], [6, 7]]
    assert [c.get("prompt_token_ids") for c in chunks] == [[1, 2, 3], None, None]
    assert all("token_ids" not in c["choices"][0] for c in streamed(chat=False))


def test_whole_answers() -> None:
    body = replies(chat=False, return_token_ids=True).whole([[FIRST, LAST]])
    assert body["object"] == "text_completion"
    assert body["usage"] == USAGE
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hey", "length")
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([5, 6, 7], [1, 2, 3])
    body = replies(chat=True).whole([[FIRST, LAST]])
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "hey"
    assert "prompt_token_ids" not in body


def several(**body: Any) -> Replies:
    return replies(chat=False, prompt=["x", "y"], **body)


OTHER = Delta(
    "z",
    [9],
    Usage(4, 1, 0),
    finish_reason="stop",
    prompt_token_ids=[1, 2, 3, 4],
    total=Usage(4, 1, 0),
)
SUMMED = {
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def test_several_prompts_are_choices_with_their_usage_summed() -> None:
    body = several(return_token_ids=True).whole([[FIRST, LAST], [OTHER]])
    told = [(c["index"], c["text"], c["finish_reason"], c["token_ids"]) for c in body["choices"]]
    assert told == [(0, "hey", "length", [5, 6, 7]), (1, "z", "stop", [9])]
    assert [c["prompt_token_ids"] for c in body["choices"]] == [[1, 2, 3], [1, 2, 3, 4]]
    assert (body["id"], body["usage"]) == ("cmpl-id", SUMMED)


def test_chunks_of_several_prompts_end_with_one_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    output_token_ids = several(stream=True, stream_options=options, return_token_ids=True)
    chunks = [
        c for i, d in ((0, FIRST), (1, OTHER), (0, LAST)) for c in output_token_ids.chunks(i, d)
    ]
    assert [[c["index"] for c in chunk["choices"]] for chunk in chunks] == [[0], [1], [0], []]
    prompts = [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks[:-1]]
    assert prompts == [[1, 2, 3], [1, 2, 3, 4], None]
    # A chunk has the usage of its own choice, as at vLLM.
    assert [c["usage"]["total_tokens"] for c in chunks] == [4, 5, 6, 11]
    assert chunks[-1]["usage"] == SUMMED
    assert {chunk["id"] for chunk in chunks} == {"cmpl-id"}
