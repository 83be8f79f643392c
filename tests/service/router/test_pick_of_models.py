"""An endpoint picker of two models picks a front of the model that the request names."""

from __future__ import annotations

import grpc.aio
import pytest

from tandem.common.config.gateway import GatewayOptions
from tandem.net.store.client import connect
from tandem.net.store.fronts import Fronts
from tests.harness.scripted_worker import ScriptedWorker
from tests.service.router.conftest import MODEL, RunningRouter, eventually
from tests.service.router.test_endpoint_picker import CHAT, ENDPOINTS, Gateway, endpoints, refusal
from tests.service.router.test_several_models import small

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

__all__ = ["small"]  # a fixture
ROUTER = {
    "more_models": f"{MODEL} group=small served-model-name=small-one",
    "gateway": GatewayOptions(endpoint_picker="127.0.0.1:0"),
}
ALL = {**ENDPOINTS, "small.decode-0": "10.0.0.3:8000"}


async def test_the_front_is_one_of_the_model(router: RunningRouter, small: ScriptedWorker) -> None:
    picker = router.router.picker
    assert picker is not None
    cluster = router.router.view.cluster
    async with connect(cluster.redis_url) as redis:
        fronts = Fronts(redis, cluster.cluster_id)
        for worker_id, endpoint in ALL.items():
            await fronts.announce(worker_id, endpoint)
        await eventually(lambda: picker.fronts.endpoints == ALL)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        gateway = Gateway(channel)
        for model, expected in (
            ("small-one", {"10.0.0.3:8000"}),
            ("tiny", set(ENDPOINTS.values())),
            ("unknown", set(ENDPOINTS.values())),  # whose front refuses the request
        ):
            picked = endpoints(await gateway.pick({**CHAT, "model": model}))
            assert set(picked) <= expected
        # Also on routes that the picker does not read, and for bodies that the front refuses.
        for path, more in (
            ("/v1/rerank", {"query": "q", "documents": ["d"]}),
            ("/tokenize", {"prompt": "p"}),
            ("/api/chat", {"model": "small-one:latest"}),
            ("/v1/chat/completions", {"seed": "wrong"}),
        ):
            body = {"model": "small-one", **more}
            assert endpoints(await gateway.pick(body, path=path)) == ["10.0.0.3:8000"]
        small.state = "draining"
        await small.write_record()
        of_small = router.router.served[1]
        await eventually(lambda: not of_small.view.has_decode_worker())
        assert refusal(await gateway.pick({**CHAT, "model": "small-one"}))[0] == 503
        assert (of_small.num_awaited, router.router.first.num_awaited) == (1, 0)


async def test_a_key_gets_a_front_of_a_model_that_it_may_use(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    small.state = "ready"
    await small.write_record()
    await eventually(lambda: router.router.served[1].view.has_decode_worker())
    created = await router.admin.post("/v1/keys", json={"tenant": "o", "role": "operator"})
    router.admin.headers["authorization"] = f"Bearer {created.json()['key']}"
    created = await router.admin.post(
        "/v1/keys", json={"tenant": "a", "limits": {"models": ["small-one"]}}
    )
    headers = {"authorization": f"Bearer {created.json()['key']}"}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        picked = endpoints(await Gateway(channel).pick(CHAT, **headers))
    assert picked == ["10.0.0.3:8000"]
