"""The HTTP API forgives unknown fields, and says its refusals in the words clients look for."""

from __future__ import annotations

import gzip
import json
from importlib import metadata
from typing import Any

import openai
import pytest

from tests.harness.scripted_worker import saying
from tests.service.router.conftest import BODY_BYTES_MAX, RunningRouter
from tests.service.router.test_http import CHAT, EOS, ids

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

PAGE = "https://app.example"
ROUTER = {"cors_origins": (PAGE,), "model_aliases": ("claude-*", "gpt-4o")}
CONTEXT = 2048  # of the workers


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_field_is_ignored_and_named(router: RunningRouter, stream: bool) -> None:
    router.script(saying([*ids(router, "Hi!"), EOS], finish_reason="stop"))
    raw = router.openai.chat.completions.with_raw_response
    extra = {"wings": 2, "stream_options": {"speed": 1}} if stream else {"wings": 2}
    answer = await raw.create(model="tiny", messages=CHAT, stream=stream, extra_body=extra)
    named = "wings, stream_options.speed" if stream else "wings"
    assert (
        answer.headers["warning"]
        == f'299 tandem "unknown fields of the request are ignored: {named}"'
    )
    usual = await raw.create(model="tiny", messages=CHAT, user="me", metadata={"a": "b"})
    assert "warning" not in usual.headers


async def test_what_is_known_and_not_supported_is_refused(router: RunningRouter) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    content = [{"type": "text", "text": "What is it?"}, image]
    for body, says in (
        ({"messages": [{"role": "user", "content": content}]}, "takes text only"),
        ({"messages": CHAT, "stop_regex": "a+"}, "stop_regex is not supported"),
    ):
        answer = await router.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
    assert not router.submitted


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([5] * 2100, None, "the prompt has 2100 tokens, and may have at most 2047"),
        (" 1x" * 100_000, None, "the prompt has 300000 characters, and may have at most 131072"),
    ],
)
async def test_too_long_a_context_is_said_as_clients_look_for_it(
    router: RunningRouter, prompt: str | list[int], max_tokens: int | None, says: str
) -> None:
    create = router.openai.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        await create(model="tiny", prompt=prompt, max_tokens=max_tokens)
    assert refused.value.code == "context_length_exceeded"
    assert f"This model's maximum context length is {CONTEXT} tokens" in refused.value.message
    assert says in refused.value.message


async def test_a_clients_id_comes_back_and_names_its_requests(router: RunningRouter) -> None:
    router.script(saying(ids(router, "ok")))
    mine = {"x-request-id": "run-7:step.1"}
    replies = []
    for _ in range(2):
        body = {"prompt": "x", "max_tokens": 1}
        answer = await router.http.post("/v1/completions", json=body, headers=mine)
        assert answer.headers["x-request-id"] == mine["x-request-id"]
        replies.append(answer.json()["id"])
    # Two requests of one name stay two requests.
    submitted = {s.request_id for s in router.submitted}  # type: ignore[attr-defined]
    first, second = (reply.removeprefix("cmpl-") for reply in replies)
    assert submitted == {first, second}
    found = (await router.http.get("/v1/requests/run-7:step.1")).json()["data"]
    assert [r["id"] for r in found] == [first, second]
    assert {r["client_request_id"] for r in found} == {"run-7:step.1"}
    one = (await router.http.get(f"/v1/requests/{replies[0]}")).json()
    assert one["id"] == first


@pytest.mark.parametrize("sent", ["a" * 129, "a b", 'a"', "é"])
async def test_an_id_that_is_malformed_is_not_taken(router: RunningRouter, sent: str) -> None:
    answer = await router.http.get("/v1/models", headers={"x-request-id": sent.encode()})
    assert len(answer.headers["x-request-id"]) == 32


async def test_every_answer_has_an_id(router: RunningRouter) -> None:
    for path in ("/health", "/v1/models", "/nothing"):
        answer = await router.http.get(path, headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
    answer = await router.http.post("/v1/completions", json={"prompt": ""})
    assert answer.status_code == 400
    assert len(answer.headers["x-request-id"]) == 32


async def test_a_page_of_a_named_origin_may_call(router: RunningRouter) -> None:
    router.script(saying(ids(router, "ok")))
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    for path in ("/v1/chat/completions", "/tokenize", "/v1/models"):
        leave = await router.http.options(path, headers=asks)
        assert leave.status_code == 200
        assert leave.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in leave.headers["access-control-allow-headers"]
    body = {"prompt": "x", "max_tokens": 1}
    answer = await router.http.post("/v1/completions", json=body, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "warning" in answer.headers["access-control-expose-headers"]


async def test_a_public_page_may_call_a_private_network(router: RunningRouter) -> None:
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    for origin, status in ((PAGE, 200), ("https://evil.example", 400)):
        leave = await router.http.options("/v1/completions", headers={**asks, "origin": origin})
        assert leave.status_code == status
    allowed = await router.http.options("/v1/completions", headers=asks)
    assert allowed.headers["access-control-allow-private-network"] == "true"


async def test_no_other_page_and_no_operators_route_gets_leave(router: RunningRouter) -> None:
    method = {"access-control-request-method": "POST"}
    other = await router.http.options(
        "/v1/completions", headers={**method, "origin": "https://evil.example"}
    )
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    for path in ("/v1/cluster", "/v1/cluster/index/verify", "/v1/keys", "/metrics", "/", "/load"):
        for answer in (
            await router.http.options(path, headers={**method, "origin": PAGE}),
            await router.http.get(path, headers={"origin": PAGE}),
        ):
            assert "access-control-allow-origin" not in answer.headers


async def test_the_model_says_what_it_is(router: RunningRouter) -> None:
    model = await router.openai.models.retrieve("tiny")
    loaded = router.router.generator.model
    assert loaded is not None
    assert model.model_extra is not None
    assert model.model_extra["root"] == loaded.folder.name
    assert model.created == int((loaded.folder.path / "config.json").stat().st_mtime) > 0


@pytest.mark.parametrize("name", ["claude-haiku-4-5", "gpt-4o"])
async def test_an_alias_is_the_model(router: RunningRouter, name: str) -> None:
    router.script(saying(ids(router, "ok")))
    answer = await router.openai.chat.completions.create(model=name, messages=CHAT, max_tokens=1)
    assert answer.model == "tiny"
    assert (await router.openai.models.retrieve(name)).id == "tiny"
    listed = (await router.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="the served model is 'tiny'"):
        await router.openai.models.retrieve("gpt-4o-mini")


async def test_head_is_a_get_without_its_body(router: RunningRouter) -> None:
    for path in ("/health", "/v1/models", "/openapi.json"):
        got = await router.http.get(path)
        head = await router.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
    assert (await router.http.head("/nothing")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/ping", "GET, HEAD, POST"),
    ],
)
async def test_405_says_what_is_allowed(
    router: RunningRouter, method: str, path: str, allowed: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = await router.http.request(method, path, headers=headers)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_body_that_says_to_be_no_json_is_415(router: RunningRouter, path: str) -> None:
    for sent in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = await router.http.post(path, content=b"{}", headers={"content-type": sent})
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "content_type_not_json"
    for sent in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"):
        answer = await router.http.post(path, content=b"{}", headers={"content-type": sent})
        assert answer.status_code == 400  # as any empty object


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "chat.completion"),
        ({"prompt": "x"}, "text_completion"),
    ],
)
async def test_an_invocation_is_a_chat_or_a_completion(
    router: RunningRouter, asked: dict[str, Any], kind: str
) -> None:
    router.script(saying(router.tokenizer.encode("Hm."), finish_reason="stop"))
    answer = await router.http.post("/invocations", json={**asked, "wings": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["object"] == kind
    assert "wings" in answer.headers["warning"]
    refused = await router.http.post("/invocations", json={"max_tokens": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


async def test_small_calls_of_other_servers(router: RunningRouter) -> None:
    version = (await router.http.get("/version")).json()
    assert version == {"version": metadata.version("tandem-llm")}
    assert (await router.http.get("/load")).json() == {"server_load": 0}
    for answer in (await router.http.get("/ping"), await router.http.post("/ping")):
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/chat/completions", "'/chat/completions' is not served here; use /v1/chat/completions"),
        ("/v1/v1/messages", "'/v1/v1/messages' is not served here; use /v1/messages"),
        (
            "/v1/chat/completions/",
            "'/v1/chat/completions/' is not served here; use /v1/chat/completions",
        ),
        ("//v1//messages", "'//v1//messages' is not served here; use /v1/messages"),
        ("/v1//v1/messages/", "'/v1//v1/messages/' is not served here; use /v1/messages"),
        ("/chat/completions/", "use /v1/chat/completions"),
        ("/v1/images/generations", "the path '/v1/images/generations' is not served here"),
    ],
)
async def test_a_wrong_path_says_which_is_meant(
    router: RunningRouter, path: str, says: str
) -> None:
    answer = await router.http.post(f"{router.http.base_url}".rstrip("/") + path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["message"].endswith(says)
    assert ("type" in answer.json()) == path.rstrip("/").endswith("/messages"), "its API's form"


async def test_the_list_of_models_has_no_slash_at_its_end(router: RunningRouter) -> None:
    answer = await router.http.get("/v1/models/")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith("use /v1/models")


async def test_a_body_may_be_compressed(router: RunningRouter) -> None:
    router.script(saying(router.tokenizer.encode("Hm."), finish_reason="stop"))
    asked = {"prompt": "x", "user": "a" * 5000}
    body = gzip.compress(json.dumps(asked).encode())
    answer = await router.http.post(
        "/v1/completions", content=body, headers={"content-encoding": "gzip"}
    )
    assert answer.status_code == 200, answer.text
    bomb = gzip.compress(b'{"prompt": "' + b"x" * (BODY_BYTES_MAX + 1))
    for content, coding, status in ((bomb, "gzip", 413), (body, "br", 415), (b"x", "gzip", 400)):
        answer = await router.http.post(
            "/v1/completions", content=content, headers={"content-encoding": coding}
        )
        assert answer.status_code == status, answer.text
        assert answer.headers.get("accept-encoding") == ("gzip" if status == 415 else None)


async def test_limits_are_those_of_the_api(router: RunningRouter) -> None:
    router.script(saying([*ids(router, "Hi!"), EOS], finish_reason="stop"))
    for body in (
        {"prompt": "def f():", "stop": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]},
        {"prompt": "def f():", "top_k": 40.0, "seed": 7.0, "n": 1.0},
        {"prompt": "def f():", "top_p": 0},
    ):
        for worker in router.workers:
            worker.submitted.clear()
        answer = await router.http.post("/v1/completions", json={**body, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    last: Any
    (last,) = router.submitted
    assert last.input.sampling.temperature == 0.0  # greedy
