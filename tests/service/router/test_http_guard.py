"""Calls that a foreign web page has a browser send, and the log of changes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from tandem.common.printable import printable
from tandem.net.rpc.tandem.v1 import cluster_pb2 as pb
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

JSON = "application/json"
# They change nothing.
COMPLETIONS = {
    *("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/{response_id}"),
    *("/v1/responses/{response_id}/cancel", "/v1/embeddings", "/invocations"),
    *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    *("/v1/classify", "/classify"),
}


@pytest_asyncio.fixture(loop_scope="module")
async def owned(router: RunningRouter) -> AsyncIterator[RunningRouter]:
    """Writes the sizes as a pool controller with one worker in each pool does."""
    view = router.router.view
    key = pools_key(router)
    await view.redis.set(key, json.dumps({"prefill": {"wanted": 1}, "decode": {"wanted": 1}}))
    await eventually(lambda: view.pools_json is not None)
    yield router
    await view.redis.delete(key, scale_key(router))
    for worker in router.workers:
        worker.role = "decode"
        worker.state = "ready"
        await worker.write_record()
    await eventually(lambda: all(w.role == "decode" for w in view.snapshots()))


def pools_key(router: RunningRouter) -> str:
    return f"{{tandem:{router.router.view.cluster.cluster_id}}}:pools"


def scale_key(router: RunningRouter) -> str:
    return f"{{tandem:{router.router.view.cluster.cluster_id}}}:scale"


async def asked_sizes(router: RunningRouter) -> list[dict[str, int]]:
    """Returns the sizes that the pool controller was asked for, newest first."""
    found = await router.router.view.redis.lrange(scale_key(router), 0, -1)
    return [json.loads(value) for value in found]


async def to_zero(router: RunningRouter, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = b'{"decode": 0, "prefill": 0}'
    return (await router.admin.post("/v1/cluster", content=body, headers=named)).status_code


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", "http://"],
)
async def test_another_origin_changes_nothing(owned: RunningRouter, origin: str) -> None:
    origin = origin.format(port=owned.router.admin.http_port)
    assert await to_zero(owned, origin=origin, content_type=JSON) == 403
    assert await asked_sizes(owned) == []


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", ""],
)
async def test_what_is_not_json_changes_nothing(owned: RunningRouter, content_type: str) -> None:
    """A foreign page can send these without a preflight."""
    assert await to_zero(owned, content_type=content_type) == 415
    assert await asked_sizes(owned) == []


async def test_a_refusal_has_the_form_of_openai_and_a_line_in_the_log(
    owned: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await owned.admin.post("/v1/cluster", content=b"{}")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "content_type_not_json")
    assert "Content-Type: application/json" in error["message"]
    logged = r"refused the call 'POST /v1/cluster' from 127\.0\.0\.1:\d+ over HTTP"
    assert re.search(logged, caplog.text)


async def test_no_route_that_changes_something_is_forgotten(router: RunningRouter) -> None:
    num_guarded = 0
    for client in (router.http, router.admin):
        paths = (await client.get("/openapi.json")).json()["paths"]
        changing = {
            (method, path)
            for path, methods in paths.items()
            for method in methods
            if method != "get" and path not in COMPLETIONS
        }
        num_guarded += len(changing)
        for method, path in changing:
            answer = await client.request(method, path, content=b"{}")
            assert answer.status_code == 415, path
    assert num_guarded >= 4


async def test_the_routers_own_page_and_json_clients_are_taken(owned: RunningRouter) -> None:
    port = owned.router.admin.http_port
    assert "page/main.js" in (await owned.admin.get("/")).text
    assert "fetch(`v1/cluster/live" in (await owned.admin.get("/page/feed.js")).text
    assert (await owned.admin.get("/v1/cluster")).status_code == 200
    assert await to_zero(owned, content_type="Application/JSON; charset=utf-8") == 202
    assert await to_zero(owned, content_type=JSON, origin=f"http://127.0.0.1:{port}") == 202
    behind = {"origin": "https://localhost", "host": "localhost:443"}
    assert await to_zero(owned, content_type=JSON, x_forwarded_proto="https", **behind) == 202
    assert await asked_sizes(owned) == [{"decode": 0, "prefill": 0}] * 3


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil", "10.0.0.1"]
)
@pytest.mark.parametrize(
    "path", ["/", "/v1/cluster", "/v1/models", "/openapi.json", "/v1/requests/x"]
)
async def test_a_foreign_host_is_refused_on_loopback(
    router: RunningRouter, host: str, path: str
) -> None:
    for client in (router.http, router.admin):
        answer = await client.get(path, headers={"host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "foreign_page"


async def test_a_foreign_host_gets_no_completion(router: RunningRouter) -> None:
    body = {"prompt": "x"}
    answer = await router.http.post("/v1/completions", json=body, headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert not router.submitted


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:9", "127.0.0.1", "127.8.8.8:1", "[::1]:8"]
)
async def test_a_name_of_loopback_is_taken(router: RunningRouter, host: str) -> None:
    router.script(saying([5], finish_reason="length"))
    for path in ("/", "/v1/cluster", "/health"):
        assert (await router.admin.get(path, headers={"host": host})).status_code == 200
    answer = await router.http.post("/v1/completions", json={"prompt": "x"}, headers={"host": host})
    assert answer.status_code == 200


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines about changes, without the port of who asked."""
    lines = [printable(r.getMessage()) for r in caplog.records if "change by" in r.getMessage()]
    return [re.sub(r"127\.0\.0\.1:\d+", "PEER", line) for line in lines]


async def test_each_change_has_one_line(
    owned: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert await to_zero(owned, content_type=JSON) == 202
    headers = {"x-forwarded-for": "192.0.2.7"}
    flip = "/v1/cluster/workers/decode-1/role"
    assert (await owned.admin.post(flip, json={}, headers=headers)).status_code == 200
    drain = "/v1/cluster/workers/decode-0/drain"
    assert (await owned.admin.post(drain, json={"force": True})).status_code == 202
    async with grpc.aio.insecure_channel(f"127.0.0.1:{owned.router.admin.grpc_port}") as channel:
        await ClusterStub(channel).ScalePools(pb.ScalePoolsRequest(sizes={"prefill": 3}))
    assert changes(caplog) == [
        "change by PEER over HTTP: sizes, before decode=1 prefill=1, after decode=0 prefill=0",
        "change by PEER over HTTP for '192.0.2.7': role of decode-1, before decode, after prefill",
        "change by PEER over HTTP: drain of decode-0, before ready, after draining",
        "change by PEER over gRPC: sizes, before prefill=1, after prefill=3",
    ]


async def test_a_change_that_is_refused_has_one_line_and_no_second_by_its_client(
    owned: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    await owned.admin.post("/v1/cluster", json={"decode": "\nchange by me"})
    await owned.admin.post("/v1/cluster/workers/a%0Ab/role", json={})
    assert changes(caplog) == [
        "change by PEER over HTTP: sizes, before unknown, after decode=\\nchange by me: refused: "
        "the size of the pool decode must be an integer from 0 to 64",
        "change by PEER over HTTP: role of a\\nb, before unknown, after the other: refused: "
        "there is no worker 'a\\nb'; there are: decode-0, decode-1",
    ]
