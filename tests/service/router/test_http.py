"""The HTTP API on the real request path, against workers that speak the real protocol."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import struct
import time

import pytest

from tandem.api.http.server import BoundedProtocol
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tests.harness.scripted_worker import Say, ScriptedWorker, refusing, saying, silent, update
from tests.service.router.conftest import BODY_BYTES_MAX, RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

EOS = 2  # of SmolLM2-Instruct: <|im_end|>
ENDS = [0, EOS, 4]  # <|endoftext|> and <reponame>, too
CHAT = [{"role": "user", "content": "Hello!"}]


def ids(router: RunningRouter, text: str) -> list[int]:
    return router.tokenizer.encode(text)


async def test_openai_client_streams_a_chat(router: RunningRouter) -> None:
    made = [*ids(router, "Grüße aus Köln 🙂!"), EOS]
    router.script(saying(made, finish_reason="stop", cached_tokens=16))
    stream = await router.openai.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        "Grüße aus Köln 🙂!"
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert usage.completion_tokens == len(ids(router, "Grüße aus Köln 🙂!")) + 1
    submit = router.submitted[0]
    assert list(submit.input.stop_token_ids) == ENDS
    prompt = router.tokenizer.decode(list(submit.input.token_ids), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n")


async def test_completion_as_token_ids(router: RunningRouter) -> None:
    made = ids(router, " one two three four")
    router.script(saying(made))
    answer = await router.openai.completions.create(
        model="tiny",
        prompt=[5, 6, 7],
        max_tokens=3,
        seed=-1,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True, "top_k": 5, "min_p": 0.5},
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (" one two three", "length")
    assert choice.token_ids == made[:3]
    assert choice.prompt_token_ids == [5, 6, 7]
    sent = router.submitted[0].input
    assert list(sent.token_ids) == [5, 6, 7]
    assert sent.sampling.seed == 2**64 - 1
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.min_p) == (0, 5, 0.5)
    assert not sent.stop_token_ids
    assert sent.max_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_text_and_the_sequence(
    router: RunningRouter, stream: bool
) -> None:
    made = ids(router, "alpha beta gamma delta epsilon")

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        for token_id in made:
            say(update(submit, [token_id]))

    router.script(script)
    answer = await router.openai.completions.create(
        model="tiny", prompt="x", stop=["nothing", "gam"], max_tokens=50, stream=stream
    )
    if stream:
        chunks = [c async for c in answer]
        text = "".join(c.choices[0].text for c in chunks)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        text = answer.choices[0].text
        assert answer.usage.completion_tokens < len(made)
        assert answer.choices[0].finish_reason == "stop"
    assert text == "alpha beta "
    await eventually(lambda: len(router.cancelled) == 1)


async def test_full_worker_is_left_for_another(router: RunningRouter) -> None:
    router.workers[0].script = refusing("queue_full")
    router.workers[1].script = saying(ids(router, "fine"))
    for _ in range(4):
        answer = await router.openai.completions.create(model="tiny", prompt="x")
        assert answer.choices[0].text == "fine"
    assert len(router.workers[1].submitted) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_429_when_all_are_full(router: RunningRouter, stream: bool) -> None:
    router.workers[0].script = refusing("queue_full", retry_after_s=7)
    router.workers[1].script = refusing("queue_full", retry_after_s=3)
    before = router.outcomes().get("queue_full", 0)
    body = {"prompt": "x", "stream": stream}
    answer = await router.http.post("/v1/completions", json=body)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "queue_full"
    assert len(router.submitted) == 2
    assert router.outcomes()["queue_full"] == before + 1


async def test_worker_lost_before_a_token_moves_the_request(router: RunningRouter) -> None:
    breaking = asyncio.create_task(router.openai.completions.create(model="tiny", prompt="x"))
    await eventually(lambda: bool(router.submitted))
    lost = next(w for w in router.workers if w.submitted)
    other = next(w for w in router.workers if w is not lost)
    other.script = saying(ids(router, "moved"))
    lost.break_streams()
    assert (await breaking).choices[0].text == "moved"
    first, second = lost.submitted[0], other.submitted[0]
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.input == second.input


async def test_three_losses_end_a_request(router: RunningRouter) -> None:
    for worker in router.workers:

        async def script(_: object, say: Say, worker: ScriptedWorker = worker) -> None:
            worker.break_streams()

        worker.script = script
    answer = await router.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "worker_lost"
    assert len(router.submitted) == 3


@pytest.mark.parametrize("phase", ["queued", "decoding", "not streaming"])
async def test_client_gone_cancels_at_the_worker(router: RunningRouter, phase: str) -> None:
    async def slowly(submit: pb.SubmitSequence, say: Say) -> None:
        say(update(submit, ids(router, "begun")))

    router.script(slowly if phase == "decoding" else silent)
    before = router.outcomes().get("cancelled", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
    body = json.dumps({"prompt": "x", "stream": phase != "not streaming"}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await eventually(lambda: bool(router.submitted))
    if phase == "decoding":
        await reader.readuntil(b"begun")
    writer.close()
    await eventually(lambda: len(router.cancelled) == 1)
    assert router.cancelled == [router.submitted[0].request_id]
    await eventually(lambda: router.outcomes().get("cancelled", 0) == before + 1)


async def test_slow_client_does_not_hold_up_others(router: RunningRouter) -> None:
    """A client that reads nothing, with more text than any buffer holds, beside one that reads."""
    long = ids(router, " word") * 2000

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        for _ in range(submit.input.max_tokens):
            say(update(submit, long[:1]))
        say(update(submit, [], "length"))

    router.script(script)
    _, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port, limit=1024)
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 2000}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await eventually(lambda: bool(router.submitted))
    answer = await router.openai.completions.create(model="tiny", prompt="x", max_tokens=5)
    assert answer.choices[0].text == " word" * 5
    writer.close()


async def test_long_prompt_goes_through_the_process_pool(router: RunningRouter) -> None:
    router.script(saying(ids(router, "ok")))
    text = " international" * 700
    await router.openai.completions.create(model="tiny", prompt=text, max_tokens=1)
    assert list(router.submitted[0].input.token_ids) == ids(router, text)
    answer = await router.http.post("/v1/completions", json={"prompt": text * 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_answers_do_not_wait_for_delayed_acks(router: RunningRouter) -> None:
    """Without TCP_NODELAY each answer on a connection that was used before takes 40 ms."""
    router.script(saying(ids(router, "ok")))
    taken_s = []
    for _ in range(10):
        began = time.perf_counter()
        await router.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        taken_s.append(time.perf_counter() - began)
    assert min(taken_s) < 0.03


async def test_a_tenant_header_is_ignored_unless_trusted(router: RunningRouter) -> None:
    router.script(saying(ids(router, "ok")))
    headers = {"x-tandem-tenant": "acme"}
    await router.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    (submit,) = router.submitted
    assert submit.input.cache_salt == b""  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_placement_is_explained_on_request(router: RunningRouter, stream: bool) -> None:
    router.script(saying(ids(router, "ok")))
    counted = await _placements(router)
    body = {"prompt": "x", "stream": stream}
    asking = {"x-tandem-placement": "1"}
    answer = await router.http.post("/v1/completions", json=body, headers=asking)
    line = answer.headers["x-tandem-placement"]
    assert re.fullmatch(r"load: decode=decode-[01] cost=\d+ms cached=0/1 .*; prefill=none", line)
    for headers in ({}, {"x-tandem-placement": "0"}):
        answer = await router.http.post("/v1/completions", json=body, headers=headers)
        assert "x-tandem-placement" not in answer.headers
    assert await _placements(router) == counted + 3


@pytest.mark.parametrize(("stream", "num_second"), [(False, 1), (True, 1), (True, 2)])
async def test_stages_come_on_request_and_are_kept(
    router: RunningRouter, stream: bool, num_second: int
) -> None:
    """With speculation, the second token may arrive together with further ones."""
    made = ids(router, "one two three")

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        first = pb.SequenceTimings(queue_ms=1, prefill_ms=2, transport="local")
        say(update(submit, made[:1], timings=first))
        await asyncio.sleep(0.05)  # the header leaves with the first token
        second = pb.SequenceTimings(second_token_ms=50, transfer_exposed_ms=20)
        say(update(submit, made[1 : 1 + num_second], timings=second))
        last = pb.SequenceTimings(prefill_worker_id="prefill-3", transport="nixl", bytes_pulled=9)
        say(update(submit, [], "length", timings=last))

    router.script(script)
    num_tokens = 1 + num_second
    body = {"prompt": "x", "stream": stream, "max_tokens": num_tokens}
    answer = await router.http.post("/v1/completions", json=body, headers={"x-tandem-timing": "1"})
    header = answer.headers["server-timing"]
    assert re.match(
        r"tokenize;dur=[\d.]+, route;dur=[\d.]+, queue;dur=[\d.]+, prefill;dur=2", header
    )
    if stream:
        assert "first_decode" not in header
        (header,) = (x for x in answer.text.splitlines() if x.startswith(": server-timing: "))
    assert "transfer_exposed;dur=20.000, first_decode;dur=30.000, ttft;dur=" in header
    request_id = answer.headers["x-request-id"]
    for name in (request_id, f"cmpl-{request_id}"):
        kept = (await router.http.get(f"/v1/requests/{name}")).json()
    assert kept["id"] == request_id
    assert (kept["outcome"], kept["moves"], kept["trace_id"]) == ("length", 0, "")
    assert kept["decode_worker"] in ("decode-0", "decode-1")
    assert (kept["prefill_worker"], kept["transport"]) == ("prefill-3", "nixl")
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "cached_tokens": 0}
    assert kept["usage"] == usage
    assert kept["stages_ms"]["first_decode"] == 30
    assert kept["ttft_ms"] < kept["e2e_ms"]
    silent_one = await router.http.post("/v1/completions", json=body)
    assert "server-timing" not in silent_one.headers
    assert ": server-timing" not in silent_one.text


async def test_a_running_a_refused_and_an_unknown_request(router: RunningRouter) -> None:
    asking = asyncio.create_task(router.http.post("/v1/completions", json={"prompt": "x"}))
    await eventually(lambda: bool(router.submitted))
    running_id = router.submitted[0].request_id  # type: ignore[attr-defined]
    told = (await router.http.get(f"/v1/requests/{running_id}")).json()
    assert (told["outcome"], told["e2e_ms"]) == ("running", None)
    assert told["placement"].startswith("load: ")
    asking.cancel()
    await eventually(lambda: router.num_running() == 0)
    told = (await router.http.get(f"/v1/requests/{running_id}")).json()
    assert told["outcome"] == "cancelled"
    router.script(refusing("queue_full", retry_after_s=2))
    refused = await router.http.post("/v1/completions", json={"prompt": "x"})
    told = (await router.http.get(f"/v1/requests/{refused.headers['x-request-id']}")).json()
    assert (told["outcome"], refused.status_code) == ("queue_full", 429)
    assert told["error"] == refused.json()["error"]["message"]
    unknown = await router.http.get("/v1/requests/nobody")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")


async def _placements(router: RunningRouter) -> float:
    page = (await router.admin.get("/metrics")).text
    (value,) = re.findall(r'^tandem_placements_total{reason="load"} (.*)$', page, re.MULTILINE)
    return float(value)


async def test_a_body_over_the_bound_is_413(router: RunningRouter) -> None:
    async def chunked():  # type: ignore[no-untyped-def]
        for _ in range(10):
            yield b"[" * BODY_BYTES_MAX

    for content in (b"x" * (10 << 20), chunked()):
        answer = await router.http.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert str(BODY_BYTES_MAX) in answer.json()["error"]["message"]


BAD = [
    ({"prompt": "x", "model": "other"}, 404, "model", "'tiny'"),
    ({"prompt": ""}, 400, "prompt", "non-empty"),
    ({"prompt": []}, 400, "prompt", "non-empty"),
    ({}, 400, "prompt", "missing"),
    ({"prompt": [1, 49152]}, 400, "prompt", "0 to 49151"),
    ({"prompt": [1, -1]}, 400, "prompt", "0 to 49151"),
    ({"prompt": ["a", 5]}, 400, "prompt", "one list of token ids"),
    ({"prompt": [1] * 2048}, 400, "prompt", "at most 2047"),
    ({"prompt": "x " * 4000}, 400, "prompt", "at most 2047"),
    ({"prompt": "x" * 200_000}, 400, "prompt", "at most 131072"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ({"prompt": "x", "max_tokens": 2**70}, 400, "max_tokens", "at least 1"),
    ({"prompt": "x", "temperature": 2.1}, 400, "temperature", "from 0 (greedy) to 2"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature", "from 0 (greedy) to 2"),
    ({"prompt": "x", "n": 0}, 400, "n", "from 1 to 128"),
    ({"prompt": "x", "n": 129}, 400, "n", "from 1 to 128"),
    ({"prompt": ["x"] * 3, "n": 43}, 400, "n", "must be at most 128"),
    ({"prompt": "x", "n": 2, "best_of": 1}, 400, "best_of", "from n to 128"),
    ({"prompt": "x", "best_of": 2, "stream": True}, 400, "best_of", "n with stream=true"),
    ({"prompt": ["x", "y"], "best_of": 65}, 400, "best_of", "65 for each of 2 prompts"),
    ({"prompt": "x", "length_penalty": 2}, 400, "length_penalty", "without use_beam_search"),
    ({"prompt": "x", "use_beam_search": True, "stream": True}, 400, "use_beam_search", "stream"),
    ({"prompt": "x", "use_beam_search": True, "n": 17}, 400, "n", "16 with use_beam_search"),
    ({"prompt": "x", "use_beam_search": True, "best_of": 2}, 400, "best_of", "n with"),
    ({"prompt": "x", "use_beam_search": True, "stop": "."}, 400, "stop", "use_beam_search"),
    ({"prompt": "x", "use_beam_search": True, "logprobs": 1}, 400, "logprobs", "leave out"),
    ({"prompt": "x", "stop_token_ids": [99999]}, 400, "stop_token_ids", "0 to 49151"),
]


@pytest.mark.parametrize(("body", "status", "param", "says"), BAD)
async def test_bad_requests(
    router: RunningRouter, body: dict[str, object], status: int, param: str, says: str
) -> None:
    answer = await router.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not router.submitted


@pytest.mark.parametrize("role", ["", "system<|im_end|>", "a b", "x" * 65])
async def test_what_is_no_role(router: RunningRouter, role: str) -> None:
    body = {"messages": [{"role": role, "content": "x"}]}
    answer = await router.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "system, user, assistant" in answer.json()["error"]["message"]
    assert not router.submitted


async def test_a_role_of_the_templates_own(router: RunningRouter) -> None:
    router.script(saying(ids(router, "Hm."), finish_reason="stop"))
    body = {"messages": [{"role": "wizard", "content": "x"}]}
    answer = await router.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    prompt = router.tokenizer.decode(list(router.submitted[0].input.token_ids))
    assert "wizard\nx" in prompt


async def test_worker_errors_keep_their_status(router: RunningRouter) -> None:
    router.script(refusing("kv_capacity_exceeded"))
    answer = await router.http.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "kv_capacity_exceeded")
    assert len(router.submitted) == 1, "a pool that is no larger need not be asked"


async def test_a_connection_that_its_client_resets_is_freed(router: RunningRouter) -> None:
    """It is freed at once, not only when it would have been idle for too long, after 75 s."""

    def num_connections() -> int:
        return sum(type(found) is BoundedProtocol for found in gc.get_objects())

    gc.collect()
    num_before = num_connections()
    reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readuntil(b'{"status":"ok"}')
    assert num_connections() == num_before + 1
    now = struct.pack("ii", 1, 0)  # close() sends a reset
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
    writer.transport.abort()
    await eventually(lambda: gc.collect() >= 0 and num_connections() == num_before)
