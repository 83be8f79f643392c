"""The admin listener over real sockets: what the public ports do not serve, and who may call it.

One router is shared by all tests. It listens on all addresses, so that each caller needs a key; its
keys come from a file, as on Kubernetes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import msgspec
import pytest
import pytest_asyncio

from tandem.api.server import Router
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.admin import AdminOptions
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.errors import Unauthenticated
from tandem.models.source import resolve
from tandem.net.rpc.tandem.v1 import cluster_pb2, inference_pb2
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.net.security import keys
from tandem.net.security.access import FailureThrottle
from tandem.net.security.audit_trail import Caller
from tandem.net.store.client import connect
from tests.harness.scripted_worker import ScriptedWorker, saying
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ADMIN_CALLS = [
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/v1/cluster"),
    ("POST", "/v1/cluster"),
    ("GET", "/v1/cluster/audit"),
    ("GET", "/v1/cluster/events"),
    ("GET", "/v1/cluster/live"),
    ("POST", "/v1/cluster/chat"),
    ("POST", "/v1/cluster/index/verify"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/cluster/workers/decode-0/role"),
    ("POST", "/v1/cluster/workers/decode-0/drain"),
    ("GET", "/v1/cluster/workers/decode-0/log"),
    ("GET", "/v1/keys"),
    ("POST", "/v1/keys"),
    ("POST", "/v1/keys/x/rotate"),
    ("POST", "/v1/keys/x/revoke"),
]
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED


@dataclass
class Door:
    """A router whose callers need keys, and a key of each kind."""

    router: Router
    worker: ScriptedWorker
    keys: dict[str, str]

    @property
    def public(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.router.admin.http_port}"

    async def call(self, kind: str, method: str, path: str, *, public: bool = False) -> Any:
        """Calls with a key of this kind. An answer that is not JSON in OpenAI's form fails the
        test."""
        body: dict[str, object] = {"prompt": "x", "max_tokens": 1} if "completions" in path else {}
        url = self.public if public else self.admin
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            json = body if method == "POST" else None
            answer = await http.request(method, path, json=json, headers=self.headers(kind))
        if answer.status_code >= 400:
            assert {"message", "type", "code", "param"} <= set(answer.json()["error"])
        return answer

    def headers(self, kind: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[kind]}"} if self.keys[kind] else {}

    async def audit(self) -> list[dict[str, Any]]:
        """Reads the audit trail, newest entry first, after all entries were written."""
        await eventually(lambda: not any(self.router._trail._journal._waiting.values()))
        answer = await self.call("operator", "GET", "/v1/cluster/audit?limit=1000")
        return list(answer.json()["entries"])


def make_keys(file: Path) -> dict[str, str]:
    """Writes records of keys of all kinds. Returns the keys' texts."""
    now = time.time()
    made = {
        "operator": keys.create("operators", "operator", now=now),
        "metrics": keys.create("prometheus", "metrics", now=now),
        "user": keys.create("acme", "user", now=now),
        "other": keys.create("other", "user", now=now),
        "expired": keys.create("acme", "operator", now=now, expires_at=now - 1),
        "revoked": keys.create("acme", "operator", now=now),
    }
    records = {kind: key.record for kind, key in made.items()}
    records["revoked"] = keys.revoke(records["revoked"], now=now)
    file.write_bytes(msgspec.json.encode(list(records.values())))
    found = {kind: key.text for kind, key in made.items()}
    wrong = f"{keys.KEY_PREFIX}-{made['operator'].record.key_id}-guessed"
    return {**found, "missing": "", "wrong": wrong, "strange": "sk-of-another-service"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Door]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    made = make_keys(file)
    cluster = ClusterConfig(f"test-{uuid.uuid4().hex[:12]}", redis_server.url, "a-token-for-tests")
    redis = connect(redis_server.url)
    worker = await ScriptedWorker(
        redis, cluster, fingerprint=resolve("smollm2").fingerprint, worker_id="decode-0"
    ).start()
    worker.script = saying([1000], finish_reason="length")
    router = Router(
        RouterConfig(
            cluster=cluster,
            model="smollm2",
            host="0.0.0.0",
            http_port=0,
            grpc_port=0,
            admin=AdminOptions(host="0.0.0.0", port=0, grpc_port=0),
            keys_file=str(file),
            drain_deadline_s=1.0,
        )
    )
    task = asyncio.create_task(router.run())
    await router.listening.wait()
    await eventually(lambda: not router.generator.not_ready_reason())
    yield Door(router, worker, made)
    router.stop()
    await task
    await worker.stop()
    await redis.aclose()


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The throttle has its own tests; without this, many failures would be delayed by 2 s each."""
    monkeypatch.setattr(FailureThrottle, "DELAY_MAX_S", 0.0)


@pytest.mark.parametrize("kind", ["missing", "user", "operator"])
async def test_the_public_port_serves_no_admin_path(door: Door, kind: str) -> None:
    for method, path in ADMIN_CALLS:
        answer = await door.call(kind, method, path, public=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_public"), path
        assert f"port {door.router.admin.http_port} of 0.0.0.0" in answer.json()["error"]["message"]
    listed = (await door.call("user", "GET", "/openapi.json", public=True)).json()["paths"]
    assert not [path for path in listed if path.startswith(("/v1/cluster", "/v1/keys", "/metrics"))]


async def test_the_admin_port_serves_no_completion(door: Door) -> None:
    answer = await door.call("operator", "POST", "/v1/completions")
    assert answer.status_code == 404
    assert not door.worker.submitted


@pytest.mark.parametrize("kind", ["missing", "user", "metrics"])
async def test_the_pages_chat_needs_an_operators_key(door: Door, kind: str) -> None:
    num_submitted = len(door.worker.submitted)
    answer = await door.call(kind, "POST", "/v1/cluster/chat")
    assert answer.status_code == (401 if kind == "missing" else 403)
    assert len(door.worker.submitted) == num_submitted


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/page.css"])
async def test_the_page_itself_needs_no_key_and_has_none(door: Door, path: str) -> None:
    answer = await door.call("missing", "GET", path)
    assert answer.status_code == 200
    assert not any(text and text in answer.text for text in door.keys.values())


@pytest.mark.parametrize("path", ["/health", "/ready", "/started"])
async def test_probes_are_answered_on_both_ports_without_a_key(door: Door, path: str) -> None:
    for public in (True, False):
        assert (await door.call("missing", "GET", path, public=public)).status_code == 200


async def test_the_public_grpc_port_has_no_cluster_service(door: Door) -> None:
    metadata = tuple(door.headers("operator").items())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{door.router.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ClusterStub(channel).GetCluster(
                cluster_pb2.GetClusterRequest(), metadata=metadata
            )
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


# kind of key, path, HTTP status, and status of gRPC's GetCluster
@pytest.mark.parametrize(
    ("kind", "path", "status", "code"),
    [
        ("missing", "/v1/cluster", 401, UNAUTHENTICATED),
        ("wrong", "/v1/cluster", 401, UNAUTHENTICATED),
        ("strange", "/v1/cluster", 401, UNAUTHENTICATED),
        ("revoked", "/v1/cluster", 401, UNAUTHENTICATED),
        ("expired", "/v1/cluster", 401, UNAUTHENTICATED),
        ("user", "/v1/cluster", 403, DENIED),
        ("metrics", "/v1/cluster", 403, DENIED),
        ("operator", "/v1/cluster", 200, None),
        ("missing", "/metrics", 401, None),
        ("user", "/metrics", 403, None),
        ("metrics", "/metrics", 200, None),
        ("operator", "/metrics", 200, None),
        ("metrics", "/v1/keys", 403, None),
        ("user", "/v1/cluster/audit", 403, None),
        ("missing", "/v1/cluster/live", 401, None),
        ("revoked", "/v1/cluster/live", 401, None),
        ("user", "/v1/cluster/live", 403, None),
        ("metrics", "/v1/cluster/live", 403, None),
    ],
)
async def test_each_refused_call_has_one_line_and_one_entry(
    door: Door,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    path: str,
    status: int,
    code: grpc.StatusCode | None,
) -> None:
    before = len(await door.audit())
    answer = await door.call(kind, "GET", path)
    assert answer.status_code == status
    expected = [f"GET {path}"] if status != 200 else []
    if path == "/v1/cluster":
        assert await grpc_code(door, kind) is code
        expected += ["GetCluster"] if code else []
    found = await door.audit()
    refusals = found[: len(found) - before]
    assert [entry["what"] for entry in refusals] == expected[::-1]
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("refused")]
    assert len(lines) == len(expected)
    secret = "".join(door.keys[kind].split("-", 2)[2:])
    for entry in refusals:
        assert entry["outcome"] == ("invalid_api_key" if status == 401 else "forbidden")
        claims = "" if kind in ("missing", "strange") else door.keys[kind].split("-")[1]
        assert entry["caller"]["key_id"] == claims
        assert entry["caller"]["address"].startswith("127.0.0.1:")
        assert entry["router_id"] == "router-0"
        assert not secret or secret not in str(entry)
    assert not secret or secret not in str(lines)


async def grpc_code(door: Door, kind: str) -> grpc.StatusCode | None:
    metadata = tuple(door.headers(kind).items())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{door.router.admin.grpc_port}") as channel:
        try:
            await ClusterStub(channel).GetCluster(
                cluster_pb2.GetClusterRequest(), metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            return error.code()
    return None


async def test_another_tenants_request_is_not_found_and_audited(door: Door) -> None:
    answer = await door.call("user", "POST", "/v1/completions", public=True)
    path = f"/v1/requests/{answer.json()['id']}"
    assert (await door.call("user", "GET", path, public=True)).status_code == 200
    before = len(await door.audit())
    unknown = await door.call("other", "GET", "/v1/requests/never-made", public=True)
    other = await door.call("other", "GET", path, public=True)
    assert unknown.status_code == other.status_code == 404
    # The answer does not reveal that the request exists.
    assert unknown.json()["error"]["code"] == other.json()["error"]["code"]
    metadata = tuple(door.headers("other").items())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{door.router.grpc_port}") as channel:
        asked = inference_pb2.GetRequestRequest(request_id=answer.json()["id"])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await InferenceStub(channel).GetRequest(asked, metadata=metadata)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    found = await door.audit()
    refusals = found[: len(found) - before]
    assert [entry["what"] for entry in refusals] == ["GetRequest", f"GET {path}"]
    assert {entry["caller"]["tenant"] for entry in refusals} == {"other"}


async def test_changes_are_audited_with_the_key_that_made_them(door: Door) -> None:
    """The output of `tandem audit` is checked, too."""
    before = len(await door.audit())
    operator_id = door.keys["operator"].split("-")[1]
    await door.call("operator", "POST", "/v1/cluster/workers/nobody/drain")
    async with httpx.AsyncClient(base_url=door.admin, headers=door.headers("operator")) as http:
        made = (await http.post("/v1/keys", json={"tenant": "new"})).json()
        await http.post(f"/v1/keys/{made['key_id']}/rotate", json={})
        await http.post(f"/v1/keys/{made['key_id']}/revoke", json={})
    found = await door.audit()
    changes = found[: len(found) - before][::-1]
    key = f"key {made['key_id']}"
    assert [(entry["what"], entry["outcome"]) for entry in changes] == [
        ("drain of nobody", "worker_not_found"),
        ("key of new", "done"),
        (key, "done"),
        (key, "done"),
    ]
    assert {entry["caller"]["key_id"] for entry in changes} == {operator_id}
    assert changes[3]["after"] == "revoked"
    shown = await tandem(door, "audit", "--limit", "4")
    assert shown.count(f"{operator_id} of operators") == 4
    assert "worker_not_found" in shown
    assert made["key"].split("-", 2)[2] not in shown


async def tandem(door: Door, *words: str) -> str:
    """Runs a command like an operator, with the router's address in a variable."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tandem.ops.cli", *words],
        env={
            **os.environ,
            "TANDEM_API_KEY": door.keys["operator"],
            "TANDEM_ADMIN_URL": door.admin,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_command_at_the_public_port_is_told_where_to_go(door: Door) -> None:
    with pytest.raises(
        AssertionError, match=r"served only on the router's admin port: .*--admin-port"
    ):
        await tandem(door, "status", "--url", door.public)


async def test_a_flood_of_refusals_pushes_no_change_out(door: Door) -> None:
    await door.call("operator", "POST", "/v1/cluster/workers/first/drain")
    trail = door.router._trail
    journal = door.router._trail._journal
    for number in range(5):
        for _ in range(300):
            trail.add_refusal(Caller("192.0.2.1:1"), f"GET /{number}", Unauthenticated("no key"))
        await eventually(lambda: not any(journal._waiting.values()))
    assert {entry["what"] for entry in await door.audit()} >= {"GET /4", "GET /2"}
    changes: Any = await journal._redis.xrevrange(journal._key("changes"))
    assert any(b"drain of first" in fields[b"entry"] for _, fields in changes)
    assert 1000 <= await journal._redis.xlen(journal._key("refusals")) < 1200


async def test_the_page_asks_for_a_key_and_needs_none_itself(door: Door) -> None:
    answer = await door.call("missing", "GET", "/")
    assert answer.status_code == 200
    assert 'id="sign-in"' in answer.text
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert not [key for key in door.keys.values() if key and key in answer.text]
