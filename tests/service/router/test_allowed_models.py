"""API keys that may use only some models: the others do not exist for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import MODEL, RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {
    "more_models": f"{MODEL} group=secret served-model-name=secret model-aliases=hidden-*",
    "model_aliases": ("any-*",),
    "ollama_api": True,
}
BODY = {"prompt": "x", "max_tokens": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keys(running: RunningRouter) -> AsyncIterator[dict[str, str]]:
    """An operator's key, a user's key for all models, and one for the first model only."""

    async def create(**body: Any) -> str:
        answer = await running.admin.post("/v1/keys", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["key"])

    # Until both models are loaded, a name may be that of the other one.
    await eventually(lambda: all(each.generator.model for each in running.router.served))
    operator = await create(tenant="operators", role="operator")
    running.admin.headers["authorization"] = f"Bearer {operator}"
    yield {
        "all": await create(tenant="a"),
        "tiny": await create(tenant="b", limits={"models": ["tiny"]}),
        "none": await create(tenant="c", limits={"models": ["gone"]}),
    }
    del running.admin.headers["authorization"]


async def ask(
    router: RunningRouter, key: str, model: str | None, path: str = "/v1/completions", **body: Any
) -> httpx.Response:
    sent = (body or BODY) | ({} if model is None else {"model": model})
    return await router.http.post(path, json=sent, headers={"authorization": f"Bearer {key}"})


def without_names(answer: httpx.Response, *names: str) -> str:
    text = answer.text
    for name in names:
        text = text.replace(name, "NAME")
    return text


async def test_a_model_that_a_key_may_not_use_is_answered_as_an_unknown_one(
    router: RunningRouter, keys: dict[str, str]
) -> None:
    router.script(saying([1000]))
    assert (await ask(router, keys["tiny"], "tiny")).status_code == 200
    assert (await ask(router, keys["tiny"], "any-name")).status_code == 200
    assert (await ask(router, keys["tiny"], None)).json()["model"] == "tiny"
    paths: dict[str, dict[str, Any]] = {
        "/v1/completions": BODY,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/v1/responses": {"input": "x"},
        "/v1/embeddings": {"input": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
        "/v1/score": {"text_1": "x", "text_2": "y"},
        "/api/chat": {"messages": [{"role": "user", "content": "x"}]},
        "/api/show": {},
    }
    for path, body in paths.items():
        refused = await ask(router, keys["tiny"], "secret", path, **body)
        unknown = await ask(router, keys["tiny"], "other", path, **body)
        assert refused.status_code == unknown.status_code == 404, (path, refused.text)
        assert without_names(refused, "secret") == without_names(unknown, "other"), path
    aliased = await ask(router, keys["tiny"], "hidden-name")
    assert aliased.status_code == 404
    assert "secret" not in aliased.text
    assert len(router.submitted) == 3


async def test_a_key_without_any_served_model_gets_404_for_every_name(
    router: RunningRouter, keys: dict[str, str]
) -> None:
    for model in (None, "tiny", "secret", "any-name"):
        answer = await ask(router, keys["none"], model)
        assert answer.status_code == 404
        assert "no model is served" in answer.text


async def test_lists_have_only_the_models_of_the_key(
    router: RunningRouter, keys: dict[str, str]
) -> None:
    for name, models in {"all": ["tiny", "secret"], "tiny": ["tiny"], "none": []}.items():
        headers = {"authorization": f"Bearer {keys[name]}"}
        listed = (await router.http.get("/v1/models", headers=headers)).json()["data"]
        assert [each["id"] for each in listed] == models
        tags = (await router.http.get("/api/tags", headers=headers)).json()["models"]
        assert [each["name"] for each in tags] == models
        one = await router.http.get("/v1/models/secret", headers=headers)
        assert one.status_code == (200 if name == "all" else 404)


async def test_grpc_knows_the_keys_models(router: RunningRouter, keys: dict[str, str]) -> None:
    address = f"127.0.0.1:{router.router.grpc_port}"
    metadata = (("authorization", f"Bearer {keys['tiny']}"),)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceStub(channel)
        listed = await stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
        assert [each.id for each in listed.models] == ["tiny"]
        for request in (
            pb.GenerateRequest(model="secret", text="x"),
            pb.EmbedRequest(model="secret"),
        ):
            call = stub.Generate if isinstance(request, pb.GenerateRequest) else stub.Embed
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call(request, metadata=metadata):
                    pass
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_the_models_of_a_key_change_with_its_limits(
    router: RunningRouter, keys: dict[str, str]
) -> None:
    router.script(saying([1000]))
    key_id = keys["none"].split("-")[1]
    for models, status in ((["tiny"], 200), (["secret"], 404), ([], 200)):
        changed = await router.admin.post(
            f"/v1/keys/{key_id}/update", json={"limits": {"models": models}}
        )
        assert changed.status_code == 200, changed.text
        assert (await ask(router, keys["none"], "tiny")).status_code == status
    wrong = await router.admin.post(f"/v1/keys/{key_id}/update", json={"limits": {"models": [""]}})
    assert wrong.status_code == 400
