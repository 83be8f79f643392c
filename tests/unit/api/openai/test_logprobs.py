from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tandem.api.openai.replies import Replies
from tandem.api.openai.requests import parse_chat, parse_completion
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.router.request.delta import Delta, Usage

HELLO = [{"role": "user", "content": "hello"}]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("smollm2").path)


def measured(logprob: float, *top: tuple[int, float], rank: int = 3) -> LogprobEntry:
    ids = [one[0] for one in top]
    values = [one[1] for one in top]
    return LogprobEntry(logprob=logprob, rank=rank, top_ids=ids, top_logprobs=values)


ONE, TWO, PARIS = (tokenizer().encode(text)[0] for text in ("one", " two", "Paris"))
EMOJI = tokenizer().encode("\U0001f600")  # several tokens, no one of them a character
DELTAS = [
    Delta(
        "one",
        [ONE],
        Usage(2, 1, 0),
        prompt_token_ids=[PARIS, TWO],
        logprobs=[measured(-1.5, (PARIS, -0.5), (TWO, -1.0))],
        prompt_logprobs=[measured(-2.0, (ONE, -0.25), (PARIS, -0.75))],
    ),
    Delta(
        "\U0001f600",
        EMOJI,
        Usage(2, 1 + len(EMOJI), 0),
        finish_reason="length",
        total=Usage(2, 1 + len(EMOJI), 0),
        logprobs=[measured(-0.25, (one, -0.25), (ONE, -3.0), rank=1) for one in EMOJI],
    ),
]

# The same, where the text waits for the last token of its character.
HELD = [
    DELTAS[0],
    Delta("", EMOJI[:-1], Usage(2, len(EMOJI), 0), logprobs=DELTAS[1].logprobs[:-1]),
    replace(DELTAS[1], token_ids=EMOJI[-1:], logprobs=DELTAS[1].logprobs[-1:]),
]


def replies(*, chat: bool, **body: Any) -> Replies:
    parsed = (
        parse_chat({"messages": HELLO, **body}, "id")
        if chat
        else parse_completion({"prompt": "Paris two", **body}, "id")
    )
    return Replies(parsed, "m", tokenizer())


def test_a_chat_has_the_bytes_of_each_token() -> None:
    body = replies(chat=True, logprobs=True, top_logprobs=2).whole([DELTAS])
    answer = ChatCompletion.model_validate(body)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert (content[0].token, content[0].logprob) == ("one", -1.5)
    assert [(t.token, t.logprob) for t in content[0].top_logprobs] == [
        ("Paris", -0.5),
        (" two", -1.0),
    ]
    assert bytes(b for one in content for b in one.bytes or ()).decode() == "one\U0001f600"


def test_a_completion_has_offsets_and_the_echoed_prompt() -> None:
    Completion.model_validate(replies(chat=False, logprobs=1).whole([DELTAS]))
    body = replies(chat=False, logprobs=1, echo=True).whole([DELTAS])
    columns = body["choices"][0]["logprobs"]
    assert columns["tokens"][:3] == ["Paris", " two", "one"]
    assert columns["text_offset"][:3] == [0, 5, 9]
    assert columns["token_logprobs"][:3] == [None, -2.0, -1.5]
    # The token itself is there, too, if it is not among the most likely ones.
    assert columns["top_logprobs"][:3] == [
        None,
        {"one": -0.25, " two": -2.0},
        {"Paris": -0.5, "one": -1.5},
    ]


def test_tokens_may_be_named_by_their_ids() -> None:
    asked = {"logprobs": 1, "return_tokens_as_token_ids": True}
    columns = replies(chat=False, **asked).whole([DELTAS])["choices"][0]["logprobs"]
    assert columns["tokens"] == [f"token_id:{one}" for one in (ONE, *EMOJI)]


@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_of_a_prompt_are_by_token_id(chat: bool) -> None:
    body = replies(chat=chat, prompt_logprobs=1).whole([DELTAS])
    told = (body if chat else body["choices"][0])["prompt_logprobs"]
    assert told == [
        None,
        {
            str(ONE): {"logprob": -0.25, "rank": 1, "decoded_token": "one"},
            str(TWO): {"logprob": -2.0, "rank": 3, "decoded_token": " two"},
        },
    ]


@pytest.mark.parametrize(
    ("chat", "asked"),
    [
        (True, {"logprobs": True, "top_logprobs": 2}),
        (False, {"logprobs": 2}),
        (False, {"logprobs": 0, "echo": True}),
    ],
)
def test_a_stream_has_what_a_whole_answer_has(chat: bool, asked: dict[str, Any]) -> None:
    whole = replies(chat=chat, **asked).whole([DELTAS])["choices"][0]["logprobs"]
    for deltas in (DELTAS, HELD):
        streaming = replies(chat=chat, stream=True, **asked)
        chunks = [chunk for delta in deltas for chunk in streaming.chunks(0, delta)]
        told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        assert {name: [one for part in told for one in part[name]] for name in whole} == whole


def test_what_stopped_the_text_is_told() -> None:
    stopped = Delta(
        "x", [4], Usage(1, 1, 0), finish_reason="stop", stop_reason="END", total=Usage(1, 1, 0)
    )
    assert replies(chat=False).whole([[stopped]])["choices"][0]["stop_reason"] == "END"
    chunk = replies(chat=True, stream=True).chunks(0, stopped)[-1]
    assert chunk["choices"][0]["stop_reason"] == "END"
