"""Ollama's API with Ollama's own Python client, against a router with scripted workers."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ollama
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tests.harness.models import HERMES_TEMPLATE, with_template
from tests.harness.scripted_worker import Say, refusing, saying, update
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {"ollama_api": True}
EOS = 2
ASKED = [{"role": "user", "content": "Paris or Rome?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXT = f"<think>\nTwo cities.\n</think>\n\nLet me look.\n{CALL}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def get_weather(city: str) -> str:
    """Returns the weather.

    Args:
        city: the name of a city
    """
    return f"{city} is sunny"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tmp_path_factory.mktemp("model") / "tiny", HERMES_TEMPLATE)


@pytest_asyncio.fixture(loop_scope="module")
async def client(router: RunningRouter) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=str(router.http.base_url)) as made:
        yield made


def says(router: RunningRouter, text: str) -> None:
    ids = router.tokenizer.encode(text, add_special_tokens=False)
    router.script(saying([*ids, EOS], finish_reason="stop"))


def submitted(router: RunningRouter) -> Any:
    (submit,) = router.submitted
    return submit.input  # type: ignore[attr-defined]


def prompt_of(router: RunningRouter) -> str:
    return router.tokenizer.decode(submitted(router).token_ids, skip_special_tokens=False)


async def test_a_chat_is_answered_whole(router: RunningRouter, client: ollama.AsyncClient) -> None:
    says(router, "Rome.")
    answer = await client.chat("tiny:latest", ASKED, options={"temperature": 0, "num_predict": 50})
    assert (answer.message.role, answer.message.content) == ("assistant", "Rome.")
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, "stop")
    assert answer.prompt_eval_count == len(submitted(router).token_ids)
    assert answer.eval_count == len(router.tokenizer.encode("Rome.")) + 1
    assert answer.total_duration >= answer.eval_duration + answer.prompt_eval_duration > 0
    assert (submitted(router).sampling.temperature, submitted(router).max_tokens) == (0.0, 50)


async def test_a_stream_ends_with_the_counts(
    router: RunningRouter, client: ollama.AsyncClient
) -> None:
    says(router, "Rome is nice.")
    parts = [part async for part in await client.chat("tiny", ASKED, stream=True)]
    assert "".join(part.message.content for part in parts) == "Rome is nice."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 1
    assert parts[-1].eval_count == len(router.tokenizer.encode("Rome is nice.")) + 1
    # Streaming is the default, one JSON object on each line.
    raw = await router.http.post("/api/chat", json={"model": "tiny", "messages": ASKED})
    assert raw.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in raw.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Rome is nice."
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


async def test_a_stream_with_line_breaks_of_unicode(
    router: RunningRouter, client: ollama.AsyncClient
) -> None:
    """The client splits a stream at each of them."""
    text = "one\u2028two\u2029three\x85four"
    says(router, text)
    parts = [part async for part in await client.chat("tiny", ASKED, stream=True)]
    assert "".join(part.message.content for part in parts) == text


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_called_and_their_results_come_back(
    router: RunningRouter, client: ollama.AsyncClient, stream: bool
) -> None:
    says(router, TEXT)
    if stream:
        made = await client.chat("tiny", ASKED, tools=[get_weather], stream=True)
        messages = [part.message async for part in made]
    else:
        messages = [(await client.chat("tiny", ASKED, tools=[get_weather])).message]
    assert "".join(m.thinking or "" for m in messages) == "Two cities."
    assert "".join(m.content or "" for m in messages) == "Let me look."
    (call,) = [call for m in messages for call in m.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"})
    assert "the name of a city" in prompt_of(router)
    router.workers[0].submitted.clear()
    router.workers[1].submitted.clear()
    says(router, "Sunny.")
    called = {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Rome")}
    answer = await client.chat("tiny", [*ASKED, called, result], tools=[get_weather])
    assert answer.message.content == "Sunny."
    assert '"arguments": {"city": "Rome"}' in prompt_of(router)
    assert "Rome is sunny" in prompt_of(router)


async def test_generate_has_a_system_prompt_or_a_raw_one(
    router: RunningRouter, client: ollama.AsyncClient
) -> None:
    says(router, "Yes.")
    answer = await client.generate("tiny", "Is it?", system="Be brief.")
    assert (answer.response, answer.done_reason) == ("Yes.", "stop")
    assert "Be brief." in prompt_of(router)
    assert "<|im_start|>assistant" in prompt_of(router)
    for worker in router.workers:
        worker.submitted.clear()
    parts = [p async for p in await client.generate("tiny", "Is it?", raw=True, stream=True)]
    assert "".join(part.response for part in parts) == "Yes."
    assert prompt_of(router) == "Is it?"
    assert submitted(router).max_tokens > 100  # no limit, unlike a completion of OpenAI's API


async def test_a_format_and_options_reach_the_worker(
    router: RunningRouter, client: ollama.AsyncClient
) -> None:
    says(router, '{"city": "Rome"}')
    options = {"seed": 7, "top_k": 5, "repeat_penalty": 1.5, "stop": ["\n"], "num_ctx": 4096}
    answer = await client.chat("tiny", ASKED, format=SCHEMA, options=options, think=False)
    assert json.loads(answer.message.content) == {"city": "Rome"}
    sent = submitted(router)
    assert "city" in sent.grammar
    sampling: Message = sent.sampling
    assert (sampling.seed, sampling.top_k, sampling.repetition_penalty) == (7, 5, 1.5)
    body = {"model": "tiny", "messages": ASKED, "options": {"num_ctx": 9, "wings": 2}}
    raw = await router.http.post("/api/chat", json=body)
    assert "options.num_ctx" in raw.headers["warning"]
    assert "options.wings" in raw.headers["warning"]


async def test_log_probabilities_come_with_the_tokens(
    router: RunningRouter, client: ollama.AsyncClient
) -> None:
    (token_id,) = router.tokenizer.encode(" the")

    async def script(submit: Any, say: Say) -> None:
        entry = LogprobEntry(logprob=-0.5, rank=1, top_ids=[token_id], top_logprobs=[-0.5])
        say(update(submit, [token_id], "length", logprobs=[entry]))

    router.script(script)
    answer = await client.chat("tiny", ASKED, logprobs=True, top_logprobs=1)
    (one,) = answer.logprobs
    assert (one.logprob, one.top_logprobs[0].logprob) == (-0.5, -0.5)
    assert one.token == answer.message.content
    assert answer.done_reason == "length"


async def test_embeddings(router: RunningRouter, client: ollama.AsyncClient) -> None:
    model = router.router.generator.model
    assert model is not None
    size = model.folder.config.hidden_size

    async def script(submit: Any, say: Say) -> None:
        state = [float(submit.input.token_ids[-1]), *[1.0] * (size - 1)]
        say(update(submit, [5], "length", embedding=state))

    router.script(script)
    texts = ["one", "one two"]
    answer = await client.embed("tiny", texts)
    lasts = [router.tokenizer.encode(text)[-1] for text in texts]
    for vector, last in zip(answer.embeddings, lasts, strict=True):
        assert len(vector) == size
        assert vector[0] / vector[1] == pytest.approx(last, rel=1e-4)
        assert math.fsum(value * value for value in vector) == pytest.approx(1)
    assert answer.prompt_eval_count == sum(len(router.tokenizer.encode(text)) for text in texts)
    older = await client.embeddings("tiny", "one two")
    assert older.embedding == pytest.approx(answer.embeddings[1])
    with pytest.raises(ollama.ResponseError, match="dimensions must be"):
        await client.embed("tiny", "x", dimensions=3)


async def test_models_are_listed_and_shown(
    router: RunningRouter, client: ollama.AsyncClient
) -> None:
    (model,) = (await client.list()).models
    assert model.model == "tiny"
    assert model.size > 10**6
    shown = await client.show("tiny")
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}
    assert shown.template == HERMES_TEMPLATE
    length = router.router.generator.max_model_len
    assert shown.modelinfo["llama.context_length"] == length
    assert shown.modelinfo["general.parameter_count"] == pytest.approx(135e6, rel=0.3)
    (running,) = (await client.ps()).models
    assert (running.model, running.context_length) == ("tiny", length)
    version = (await router.http.get("/api/version")).json()
    assert version["version"].count(".") == 2


async def test_an_empty_prompt_loads_nothing(
    router: RunningRouter, client: ollama.AsyncClient
) -> None:
    assert (await client.generate("tiny", keep_alive="5m")).done_reason == "load"
    assert (await client.chat("tiny", keep_alive=0)).done_reason == "unload"
    assert not router.submitted


@pytest.mark.parametrize(
    ("path", "body", "status", "says_what"),
    [
        ("/api/chat", {"messages": ASKED}, 400, "model is missing"),
        ("/api/chat", {"model": "huge", "messages": ASKED}, 404, "is not served here"),
        ("/api/generate", {"model": "huge"}, 404, "is not served here"),
        ("/api/show", {"model": "huge"}, 404, "is not served here"),
        ("/api/chat", {"model": "tiny", "messages": "hi"}, 400, "messages is not valid"),
        ("/api/chat", {"options": {"temperature": -1}}, 400, "temperature must be"),
        ("/api/chat", {"options": {"repeat_penalty": 0}}, 400, "repeat_penalty must be"),
        ("/api/chat", {"options": {"seed": "x"}}, 400, "seed is not valid"),
        ("/api/chat", {"format": {"type": 7}}, 400, "format"),
        ("/api/chat", {"format": "xml"}, 400, "format is not valid"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "context is not supported"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, 400, "takes text only"),
        ("/api/embed", {"input": ""}, 400, "input must be"),
        ("/api/pull", {"model": "tiny"}, 404, "is not served here"),
    ],
)
async def test_errors_have_ollamas_form(
    router: RunningRouter, path: str, body: dict[str, Any], status: int, says_what: str
) -> None:
    if path == "/api/chat" and "messages" not in body:
        body = {"messages": ASKED, **body}
    if "messages" not in body or "options" in body or "format" in body:
        body = {"model": "tiny", **body}
    answer = await router.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert isinstance(answer.json()["error"], str)
    assert says_what in answer.json()["error"]
    assert not router.submitted


async def test_the_root_says_that_it_runs(router: RunningRouter) -> None:
    """`ollama list` and other clients call it first."""
    assert (await router.http.get("/")).text == "Ollama is running"
    assert (await router.http.head("/")).status_code == 200


async def test_a_call_may_have_any_content_type_but_not_from_a_page(router: RunningRouter) -> None:
    """Ollama's documentation has calls such as `curl URL -d '{"model": ...}'`."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    for path, body in (
        ("/api/chat", {"messages": ASKED, "options": {"num_predict": 50.0}, "think": "max"}),
        ("/api/generate", {"prompt": "a"}),
        ("/api/show", {}),
    ):
        says(router, "Rome.")
        content = json.dumps({"model": "tiny", **body})
        answer = await router.http.post(path, content=content, headers=form)
        assert answer.status_code == 200, answer.text
        page = {**form, "origin": "https://evil.example"}
        refused = await router.http.post(path, content=content, headers=page)
        assert refused.status_code == 415


async def test_an_error_ends_a_stream(router: RunningRouter, client: ollama.AsyncClient) -> None:
    router.script(refusing("internal_error"))
    with pytest.raises(ollama.ResponseError, match="says the test"):
        async for _ in await client.chat("tiny", ASKED, stream=True):
            pass
