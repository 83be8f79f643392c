"""OpenAI's embeddings with OpenAI's client: what reaches the workers, and what comes back."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest

from tests.harness.scripted_worker import Say, update
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


def size(router: RunningRouter) -> int:
    model = router.router.generator.model
    assert model is not None
    return model.folder.config.hidden_size


def state_of(submit: Any, num: int) -> list[float]:
    """Returns a state that tells prompts apart by their last token."""
    return [float(submit.input.token_ids[-1]), *[1.0] * (num - 1)]


def embeds(router: RunningRouter) -> None:
    num = size(router)

    async def script(submit: Any, say: Say) -> None:
        say(update(submit, [5], "length", embedding=state_of(submit, num), cached_tokens=1))

    router.script(script)


def normalized(state: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in state))
    return [value / length for value in state]


async def test_inputs_are_embedded_in_their_order(router: RunningRouter) -> None:
    embeds(router)
    texts = ["one", "one two", "one two three"]
    answer = await router.openai.embeddings.create(model="tiny", input=texts)
    ids = [router.tokenizer.encode(text) for text in texts]
    sent = {tuple(s.input.token_ids) for s in router.submitted}  # type: ignore[attr-defined]
    assert sent == set(map(tuple, ids))
    for submit in router.submitted:
        assert submit.input.embed  # type: ignore[attr-defined]
        assert submit.input.max_tokens == 1  # type: ignore[attr-defined]
    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, tokens in zip(answer.data, ids, strict=True):
        expected = normalized([float(tokens[-1]), *[1.0] * (size(router) - 1)])
        assert one.embedding == pytest.approx(expected, abs=1e-6)
    num_tokens = sum(map(len, ids))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    as_ids = await router.openai.embeddings.create(model="tiny", input=ids)
    assert [one.embedding for one in as_ids.data] == [one.embedding for one in answer.data]


async def test_both_encodings_are_the_same_numbers(router: RunningRouter) -> None:
    embeds(router)
    found = {}
    for encoding in ("float", "base64"):
        body = {"input": "x", "encoding_format": encoding, "dimensions": size(router)}
        answer = await router.http.post("/v1/embeddings", json=body)
        found[encoding] = answer.json()["data"][0]["embedding"]
    data = base64.b64decode(found["base64"])
    assert list(struct.unpack(f"<{size(router)}f", data)) == found["float"]


async def test_more_inputs_than_go_at_once(router: RunningRouter) -> None:
    embeds(router)
    inputs = [[number] for number in range(100, 400)]
    answer = await router.openai.embeddings.create(model="tiny", input=inputs)
    assert len(answer.data) == len(inputs)
    told = [one.embedding[0] / one.embedding[1] for one in answer.data]
    assert told == pytest.approx([number for (number,) in inputs], rel=1e-4)


@pytest.mark.parametrize(
    ("field", "value", "says_what"),
    [
        ("input", "", "input must be a non-empty string"),
        ("input", [], "input must be a non-empty string"),
        ("input", ["a", ""], "input 1 (from 0): input must be"),
        ("input", [[1], [10**9]], "input 1 (from 0): input has the token id"),
        ("input", [[7]] * 128 + [[10**9]], "input 128 (from 0): input has the token id"),
        ("input", ["a", 5], "input.1"),
        ("input", ["a"] * 2049, "at most 2048"),
        ("dimensions", 7, "dimensions must be"),
        ("encoding_format", "int8", "float or base64"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens must be"),
    ],
)
async def test_each_refusal_names_the_field(
    router: RunningRouter, field: str, value: Any, says_what: str
) -> None:
    embeds(router)
    body = {"input": "x", field: value}
    with pytest.raises(openai.BadRequestError) as raised:
        await router.openai.post("/embeddings", body=body, cast_to=httpx.Response)
    assert raised.value.param == field
    assert says_what in raised.value.message
    assert len(router.submitted) == (128 if "128" in says_what else 0)  # a group before it


async def test_a_long_input_is_refused_or_cut(router: RunningRouter) -> None:
    embeds(router)
    long = [[5] * 3000]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as raised:
        await router.openai.embeddings.create(model="tiny", input=long)
    assert raised.value.param == "input"
    cut = await router.openai.embeddings.create(
        model="tiny", input=long, extra_body={"truncate_prompt_tokens": 10}
    )
    assert cut.usage.prompt_tokens == 10


async def test_an_old_worker_is_an_error_and_no_empty_answer(router: RunningRouter) -> None:
    async def script(submit: Any, say: Say) -> None:
        say(update(submit, [5], "length"))

    router.script(script)
    answer = await router.http.post("/v1/embeddings", json={"input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "incompatible")


async def test_the_model_says_how_it_pools(router: RunningRouter) -> None:
    model = (await router.http.get("/v1/models/tiny")).json()
    told = {"pooling": "last", "normalized": True, "dimensions": size(router)}
    assert model["embedding"] == told


@pytest.mark.parametrize(
    ("sent", "priority"),
    [({"priority": -3}, -3), ({"nvext": {"agent_hints": {"priority": 5}}}, -5), ({}, 0)],
)
async def test_embeddings_have_a_priority(
    router: RunningRouter, sent: dict[str, Any], priority: int
) -> None:
    embeds(router)
    answer = await router.http.post("/v1/embeddings", json={"input": "x", **sent})
    assert answer.status_code == 200
    assert "warning" not in answer.headers
    record = await router.http.get(f"/v1/requests/{answer.headers['x-request-id']}")
    assert record.json()["priority"] == priority
    wrong = {"input": "x", "priority": 2**31}
    refused = await router.http.post("/v1/embeddings", json=wrong)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
