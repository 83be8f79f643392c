"""The tenant that a gateway names: in the salt of the blocks, of HTTP and gRPC alike."""

from __future__ import annotations

import grpc.aio
import pytest

from services.errors import BadRequest
from services.router.tenants import cache_salt
from services.rpc.tandem.v1 import inference_pb2 as pb
from services.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {"trust_tenant_header": True}
TOKEN = "a-token-for-tests"
BODY = {"prompt": "x", "max_tokens": 1}


async def test_the_tenant_salts_the_blocks(router: RunningRouter) -> None:
    router.script(saying([1000]))
    for headers in ({}, {"x-tandem-tenant": "acme"}, {"x-tandem-tenant": "other"}):
        answer = await router.http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200
    address = f"127.0.0.1:{router.router.grpc_port}"
    async with grpc.aio.insecure_channel(address) as channel:
        metadata = (("x-tandem-tenant", "acme"),)
        request = pb.GenerateRequest(text="x", max_tokens=1)
        async for _ in InferenceStub(channel).Generate(request, metadata=metadata):
            pass
    salts = sorted(s.input.cache_salt for s in router.submitted)  # type: ignore[attr-defined]
    acme, other = (cache_salt(TOKEN, name) for name in ("acme", "other"))
    assert salts == sorted([b"", acme, other, acme])


async def test_two_names_are_refused(router: RunningRouter) -> None:
    headers = [("x-tandem-tenant", "acme"), ("x-tandem-tenant", "other")]
    answer = await router.http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == BadRequest.code
    assert not router.submitted
