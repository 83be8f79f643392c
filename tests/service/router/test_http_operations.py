"""Operators' calls over HTTP: health, metrics, the document of the API, pool sizes."""

from __future__ import annotations

import json

import pytest

from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


async def test_operations(router: RunningRouter) -> None:
    assert (await router.http.get("/health")).status_code == 200
    assert (await router.http.get("/ready")).status_code == 200
    assert [m.id async for m in router.openai.models.list()] == ["tiny"]
    state = (await router.admin.get("/v1/cluster")).json()
    assert [w["worker_id"] for w in state["workers"]] == ["decode-0", "decode-1"]
    assert state["pools"]["decode"]["ready"] == 2
    assert [(w["worker_id"], w["state"]) for w in state["known_workers"]] == [
        ("decode-0", "ready"),
        ("decode-1", "ready"),
    ]
    assert state["headline"] == "All is well: 2 decode workers are ready."
    page = await router.admin.get("/")
    assert "<title>Tandem</title>" in page.text
    metrics = (await router.admin.get("/metrics")).text
    for name in ("tandem_time_to_first_token_seconds_bucket", "tandem_prompt_tokens_total"):
        assert name in metrics
    refused = await router.admin.get("/metrics", params={"names": "sglang"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "names")
    answer = await router.http.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_scaling_is_asked_through_redis(router: RunningRouter) -> None:
    view = router.router.view
    key = f"{{tandem:{view.cluster.cluster_id}}}"
    answer = await router.admin.post("/v1/cluster", json={"decode": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_now")
    assert "kubectl scale statefulset" in answer.json()["error"]["message"]  # who owns them
    assert not await view.redis.exists(f"{key}:scale")
    await view.redis.set(f"{key}:pools", json.dumps({"decode": {"wanted": 5, "running": 2}}))
    answer = await router.admin.post("/v1/cluster", json={"prefill": 2, "decode": 1})
    assert answer.status_code == 202
    assert json.loads(await view.redis.rpop(f"{key}:scale")) == {"prefill": 2, "decode": 1}
    await eventually(lambda: view.pools_json is not None)
    state = (await router.admin.get("/v1/cluster")).json()
    counts = dict.fromkeys(("running", "registered", "ready", "serving"), 2)
    assert state["pools"]["decode"] == {"wanted": 5, **counts}
    for body in ({}, {"decode": -1}, {"decode": True}, {"gpu": 1}):
        assert (await router.admin.post("/v1/cluster", json=body)).status_code == 400
