"""A list of prompts in one body: a choice each, one answer, one end."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tests.harness.scripted_worker import Say, Script, refusal, saying, silent, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

TEXTS = [" one two", " three", " four five six"]


async def echo(submit: pb.SubmitSequence, say: Say) -> None:
    """Says the prompt, token by token."""
    token_ids = list(submit.input.token_ids)
    for index, token_id in enumerate(token_ids):
        last = index == len(token_ids) - 1
        say(update(submit, [token_id], "length" if last else "", cached_tokens=0))
        await asyncio.sleep(0)


def one_of_them(first_token: int, one: Script, others: Script) -> Script:
    """The prompt that begins with this token gets a script of its own."""

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        await (one if submit.input.token_ids[0] == first_token else others)(submit, say)

    return script


async def fail_after_a_token(submit: pb.SubmitSequence, say: Say) -> None:
    say(update(submit, [1000]))
    say(refusal(submit, "internal_error"))


async def begin(submit: pb.SubmitSequence, say: Say) -> None:
    say(update(submit, [1000]))


def events(text: str) -> list[dict[str, Any]]:
    """Returns the events of a stream that ended well, with one [DONE] as the last."""
    lines = [line for line in text.splitlines() if line]
    assert [line for line in lines if line == "data: [DONE]"] == lines[-1:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def post(router: RunningRouter, prompt: Any, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 50, "ignore_eos": True, **fields}
    return await router.http.post("/v1/completions", json=body)


@pytest.mark.parametrize("as_token_ids", [False, True])
async def test_each_prompt_has_the_choice_of_its_index(
    router: RunningRouter, as_token_ids: bool
) -> None:
    router.script(echo)
    ids = [router.tokenizer.encode(text) for text in TEXTS]
    prompts = ids if as_token_ids else TEXTS
    alone = [(await post(router, p, return_token_ids=True)).json() for p in prompts]
    whole = (await post(router, prompts, return_token_ids=True)).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert [c["text"] for c in whole["choices"]] == TEXTS
    for choice, other in zip(whole["choices"], alone, strict=True):
        assert {**choice, "index": 0} == other["choices"][0]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(other["usage"][name] for other in alone)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_echoes_its_final_assistant_message(
    router: RunningRouter, stream: bool
) -> None:
    router.script(saying(router.tokenizer.encode(" away"), finish_reason="length"))
    begun = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "The doctor"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    cases: list[Any] = [(begun, continued, "The doctor away"), (begun[:1], {}, " away")]
    for messages, fields, expected in cases:
        body = {"messages": messages, "max_tokens": 1, "stream": stream, "echo": True, **fields}
        answer = await router.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        if stream:
            deltas = [c["delta"] for event in events(answer.text) for c in event["choices"]]
            assert "".join(delta.get("content") or "" for delta in deltas) == expected
        else:
            assert answer.json()["choices"][0]["message"]["content"] == expected


async def test_a_stream_has_the_chunks_of_all_one_usage_and_one_end(router: RunningRouter) -> None:
    router.script(echo)
    answer = await post(
        router, TEXTS, stream=True, return_token_ids=True, stream_options={"include_usage": True}
    )
    *chunks, last = events(answer.text)
    made: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert chunk["usage"] is None
        made[choice["index"]] = made.get(choice["index"], "") + choice["text"]
    assert [made[i] for i in range(3)] == TEXTS
    ends = sorted(c["index"] for x in chunks for c in x["choices"] if c["finish_reason"])
    assert ends == [0, 1, 2]
    assert last["choices"] == []
    num_tokens = sum(len(router.tokenizer.encode(text)) for text in TEXTS)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (
        num_tokens,
        num_tokens,
    )
    assert {x["id"] for x in (*chunks, last)} == {f"cmpl-{answer.headers['x-request-id']}"}


async def test_chunks_come_as_they_are_made(router: RunningRouter) -> None:
    """A prompt that waits holds up no other."""
    router.script(one_of_them(5, silent, echo))
    body = {"prompt": [[5], [6], [7]], "stream": True, "max_tokens": 5}
    async with router.http.stream("POST", "/v1/completions", json=body) as answer:
        ended = set()
        async for line in answer.aiter_lines():
            if line:
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                ended.add(choice["index"])
            if ended == {1, 2}:
                break
    await eventually(lambda: len(router.cancelled) == 1)


async def test_seeds(router: RunningRouter) -> None:
    router.script(echo)
    await post(router, TEXTS, seed=7)
    await post(router, TEXTS)
    seeds = Counter(s.input.sampling.seed for s in router.submitted)  # type: ignore[attr-defined]
    assert seeds[7] == 3, "a seed that is given is that of each prompt"
    assert len(seeds) == 4, "else each prompt has one of its own"


BAD: list[tuple[Any, str]] = [
    (["x"] * 129, "at most 128 such prompts"),
    (["fine", ""], "prompt 1 (from 0)"),
    (["fine", 7], "prompt.1"),
    ([[5], [6, 99999]], "prompt 1 (from 0)"),
    (["fine", "fine", "word " * 4000], "prompt 2 (from 0)"),  # known only once it is tokenized
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "says"), BAD)
async def test_one_bad_prompt_refuses_the_body(
    router: RunningRouter, prompt: Any, says: str, stream: bool
) -> None:
    router.script(echo)
    answer = await post(router, prompt, stream=stream, max_tokens=None)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt")
    assert says in error["message"]
    assert not router.submitted, "none is placed before all are known to be good"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_one_ends_all(router: RunningRouter, stream: bool) -> None:
    async def refuse(submit: pb.SubmitSequence, say: Say) -> None:
        await eventually(lambda: len(router.submitted) == 3)  # there is something to cancel
        say(refusal(submit, "kv_capacity_exceeded"))

    router.script(one_of_them(6, refuse, silent))
    before = router.outcomes()
    answer = await post(router, [[5], [6], [7]], stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "kv_capacity_exceeded")
    assert answer.json()["error"]["message"].startswith("prompt 1 (from 0): ")
    await eventually(lambda: len(router.cancelled) == 2)
    after = router.outcomes()
    new = {name: after[name] - before.get(name, 0) for name in after}
    assert {n: count for n, count in new.items() if count} == {
        "kv_capacity_exceeded": 1,
        "cancelled": 2,
    }
    assert router.num_running() == 0


async def test_an_error_in_the_midst_of_a_stream_ends_it_once(router: RunningRouter) -> None:
    router.script(one_of_them(6, fail_after_a_token, begin))
    body = {"prompt": [[5], [6], [7]], "stream": True, "max_tokens": 5}
    answer = await router.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if line]
    assert [line for line in lines if "error" in line] == lines[-1:]
    assert "[DONE]" not in answer.text
    await eventually(lambda: len(router.cancelled) == 2)
    assert router.num_running() == 0


@pytest.mark.parametrize("phase", ["queued", "decoding", "not streaming"])
async def test_client_gone_cancels_all(router: RunningRouter, phase: str) -> None:
    router.script(begin if phase == "decoding" else silent)
    before = router.outcomes().get("cancelled", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
    body = json.dumps({"prompt": TEXTS, "stream": phase != "not streaming"}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await eventually(lambda: len(router.submitted) == 3)
    if phase == "decoding":
        await reader.readuntil(b"data: ")
    writer.close()
    await eventually(lambda: len(router.cancelled) == 3)
    submitted = [s.request_id for s in router.submitted]  # type: ignore[attr-defined]
    assert sorted(router.cancelled) == sorted(submitted)
    await eventually(lambda: router.outcomes().get("cancelled", 0) == before + 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_and_the_requests_of_an_answer(router: RunningRouter, stream: bool) -> None:
    router.script(echo)
    answer = await router.http.post(
        "/v1/completions",
        json={"prompt": TEXTS, "max_tokens": 9, "stream": stream},
        headers={"x-tandem-timing": "1", "x-tandem-placement": "1"},
    )
    assert answer.headers["x-tandem-placement"].startswith("load: ")
    assert "ttft;dur=" in answer.headers["server-timing"]
    if stream:
        assert answer.text.count(": server-timing: ") == 1
    request_id = answer.headers["x-request-id"]
    for name in (request_id, f"cmpl-{request_id}"):
        told = (await router.http.get(f"/v1/requests/{name}")).json()
        assert [r["id"] for r in told["data"]] == [f"{request_id}-{i}" for i in range(3)]
    one = (await router.http.get(f"/v1/requests/{request_id}-2")).json()
    assert one == told["data"][2]
    assert one["outcome"] == "length"
