"""A router of two models with scripted workers. Both models have the same files, so only their
groups tell the workers apart."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import httpx
import ollama
import pytest
import pytest_asyncio

from tandem.api.routes.batches import UNSERVED_LINES_MAX
from tandem.common.config.files import FileOptions
from tandem.errors import ConfigError
from tandem.net.rpc.tandem.v1 import cluster_pb2
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.scripted_worker import ScriptedWorker, saying
from tests.service.router.conftest import MODEL, RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

SMALL = (
    f"{MODEL} group=small served-model-name=small-one model-aliases=small-* autoscale=on "
    "autoscale-prefill-min=0 autoscale-prefill-max=0 autoscale-decode-min=0 "
    "autoscale-interval=0.1 tool-parser=json"
)
_FOLDER = tempfile.TemporaryDirectory()
ROUTER = {
    "more_models": SMALL,
    "ollama_api": True,
    "files": FileOptions(files_url=_FOLDER.name + "/files"),
}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(running: RunningRouter) -> AsyncIterator[ScriptedWorker]:
    """A decode worker of the second model."""
    view = running.router.view
    worker = await ScriptedWorker(
        view.redis,
        view.cluster,
        fingerprint=view.model_fingerprint,
        worker_id="small.decode-0",
        group="small",
    ).start()
    of_small = running.router.served[1].view
    await eventually(of_small.has_decode_worker)
    yield worker
    await worker.stop()


async def chat(router: RunningRouter, **fields: Any) -> httpx.Response:
    return await router.http.post("/v1/chat/completions", json={**CHAT, **fields})


async def test_a_request_goes_to_the_workers_of_its_model(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    router.script(saying([1000, 1001]))
    small.script = saying([2000, 2001])
    small.submitted.clear()
    for name, served in (("tiny", "tiny"), ("small-one", "small-one"), ("small-x", "small-one")):
        answer = await chat(router, model=name)
        assert answer.json()["model"] == served, answer.text
    assert (len(router.submitted), len(small.submitted)) == (1, 2)
    assert [w.record.worker_id for w in router.router.served[1].view.known()] == ["small.decode-0"]
    assert "small.decode-0" not in {w.record.worker_id for w in router.router.view.known()}


async def test_each_model_has_its_own_settings(router: RunningRouter) -> None:
    first, second = router.router.served
    assert first.config.model_aliases == ()
    assert second.config.answers.tool_parser == "json"
    assert (first.config.autoscale.mode, second.config.autoscale.mode) == ("off", "on")
    assert second.config.hold_deadline_s == 5.0  # as the first model


async def test_unknown_names_are_refused_in_each_api(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    message = "the model 'other' is not served here; the served models are 'tiny', 'small-one'"
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "x"},
        "/v1/messages": CHAT,
        "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
        "/v1/responses": {"input": "x"},
        "/v1/embeddings": {"input": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
        "/v1/rerank": {"query": "x", "documents": ["y"]},
        "/v1/classify": {"input": "x"},
    }
    for path, body in bodies.items():
        answer = await router.http.post(path, json={**body, "model": "other"})
        assert answer.status_code == 404, path
        assert message in answer.text.replace("\\u0027", "'"), path


async def test_ollama_lists_and_serves_both(router: RunningRouter, small: ScriptedWorker) -> None:
    small.script = saying([2000, 2001])
    async with ollama.AsyncClient(host=str(router.http.base_url)) as client:
        listed = await client.list()
        assert [each.model for each in listed.models] == ["tiny", "small-one"]
        answer = await client.chat("small-one:latest", CHAT["messages"])  # type: ignore[arg-type]
        assert answer.model == "small-one"


async def start_batch(router: RunningRouter, models: list[str]) -> Any:
    """Starts a batch with a line for each of these models."""
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions"}
        | {"body": {**CHAT, "model": model}}
        for n, model in enumerate(models)
    ]
    data = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    file = await router.openai.files.create(file=("in.jsonl", data), purpose="batch")
    return await router.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


async def reporting_until(
    workers: list[ScriptedWorker], is_true: Callable[[], Awaitable[bool]]
) -> None:
    """Waits. Meanwhile the workers report that they are idle, as real ones do."""
    async with asyncio.timeout(60):
        while not await is_true():
            for worker in workers:
                worker.tell_load(1 << 30)
            await asyncio.sleep(0.05)


async def test_the_lines_of_a_batch_go_to_the_models_that_they_name(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    workers = [*router.workers, small]
    for worker in workers:
        worker.script = saying([2000, 2001])
    small.submitted.clear()
    batch = await start_batch(router, ["tiny", "small-one", "small-one", "other"])

    async def is_over() -> bool:
        nonlocal batch
        batch = await router.openai.batches.retrieve(batch.id)
        return batch.status in ("completed", "failed", "expired")

    await reporting_until(workers, is_over)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 1)
    assert (len(router.submitted), len(small.submitted)) == (1, 2)
    failed = await router.openai.files.content(batch.error_file_id)
    assert "the served models are" in failed.text


async def test_few_lines_wait_for_a_model_without_workers(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    """The others do not fill the queue of its requests, nor stop the lines of other models."""
    workers = [*router.workers, small]
    for worker in workers:
        worker.script = saying([2000, 2001])
    small.submitted.clear()
    of_small = router.router.served[1]
    small.state = "draining"
    await small.write_record()
    await eventually(lambda: not of_small.view.has_decode_worker())
    try:
        batch = await start_batch(router, [*["small-one"] * 20, *["tiny"] * 5])

        async def of_tiny_are_done() -> bool:
            found = await router.openai.batches.retrieve(batch.id)
            return found.request_counts.completed == 5

        await reporting_until(router.workers, of_tiny_are_done)
        assert of_small.dispatcher.num_pending == UNSERVED_LINES_MAX
        assert not small.submitted
        asking = asyncio.create_task(chat(router, model="small-one"))
        await eventually(lambda: of_small.dispatcher.num_pending == UNSERVED_LINES_MAX + 1)
    finally:
        small.state = "ready"
        await small.write_record()

    async def is_completed() -> bool:
        found = await router.openai.batches.retrieve(batch.id)
        return found.status == "completed" and found.request_counts.completed == 25

    await reporting_until(workers, is_completed)
    assert len(small.submitted) == 21
    assert (await asking).status_code == 200


async def test_a_request_is_found_whatever_its_model_is(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    small.script = saying([2000, 2001])
    answer = await chat(router, model="small-one")
    found = await router.admin.get(f"/v1/requests/{answer.json()['id']}")
    assert found.json()["decode_worker"] == "small.decode-0"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        message = pb.GetRequestRequest(request_id=answer.json()["id"])
        record = await InferenceStub(channel).GetRequest(message)
    assert record.decode_worker == "small.decode-0"


async def test_workers_are_changed_by_their_names(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    await router.admin.post(
        "/v1/cluster/workers/small.decode-0/drain", json={"deadline_s": 3, "force": True}
    )
    assert small.drains == [3.0]
    assert all(not worker.drains for worker in router.workers)


async def test_the_page_shows_the_model_that_it_is_asked_for(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    for name, shown in (("", "tiny"), ("small-one", "small-one"), ("small", "small-one")):
        async with router.admin.stream("GET", f"/v1/cluster/live?model={name}") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    head = json.loads(line[len("data: ") :])["head"]
                    assert (head["model"], head["models"]) == (shown, ["tiny", "small-one"])
                    break
    answer = await router.admin.get("/v1/cluster/live?model=other")
    assert answer.status_code == 404


class Controller:
    """Writes pools as a pool controller does, and starts a worker when it is asked for one."""

    def __init__(self, router: RunningRouter, small: ScriptedWorker) -> None:
        self._redis = router.router.view.redis
        self._key = f"{{tandem:{router.router.view.cluster.cluster_id}}}"
        self.small = small
        self.asked: list[dict[str, int]] = []

    async def write(self, size: int) -> None:
        pools = {
            "router": {"wanted": 1},
            "prefill": {"wanted": 0},
            "decode": {"wanted": 2},
            "small.prefill": {"wanted": 0},
            "small.decode": {"wanted": size},
        }
        await self._redis.set(f"{self._key}:pools", json.dumps(pools))

    async def take(self) -> dict[str, int]:
        value = await self._redis.brpop([f"{self._key}:scale"], timeout=10)
        assert value is not None, "nobody asked the controller"
        self.asked.append(json.loads(value[1]))
        return self.asked[-1]

    async def close(self) -> None:
        await self._redis.delete(f"{self._key}:pools", f"{self._key}:scale")


async def test_a_request_starts_the_empty_pool_of_its_model_and_is_answered(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    controller = Controller(router, small)
    of_small = router.router.served[1]
    small.state = "draining"
    await small.write_record()
    await eventually(lambda: not of_small.view.has_decode_worker())
    try:
        await controller.write(0)
        await eventually(
            lambda: any(d.role == "decode" and d.to == 0 for d in of_small.view.decisions),
            deadline_s=60,  # the requests of the tests before count for a while
        )
        assert not router.router.models.not_ready_reason()  # the first model is served
        small.script = saying([2000, 2001])
        answering = asyncio.create_task(chat(router, model="small-one"))
        assert await controller.take() == {"small.decode": 1}
        await controller.write(1)
        small.state = "ready"
        await small.write_record()
        answer = await answering
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "small-one"
    finally:
        small.state = "ready"
        await small.write_record()
        await controller.close()
        await eventually(of_small.view.has_decode_worker)


async def test_pools_are_scaled_and_shown_by_their_names(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    controller = Controller(router, small)
    try:
        await controller.write(1)
        await eventually(lambda: all(m.view.pools_json for m in router.router.served))
        sizes = {"decode": 3, "small.prefill": 2}
        answer = await router.admin.post("/v1/cluster", json=sizes)
        assert answer.json() == {"wanted": sizes}
        taken = await controller.take() | await controller.take()
        assert sizes.items() <= taken.items()
        state = (await router.admin.get("/v1/cluster")).json()
        assert state["pools"]["small.decode"]["wanted"] == 1
        assert {pool for pool in state["pools"] if "." in pool} == {"small.prefill", "small.decode"}
        assert [each["autoscale"]["mode"] for each in state["models"]] == ["off", "on"]
        for wrong in ({"small.router": 1}, {"other.decode": 1}, {"small.decode": -1}):
            assert (await router.admin.post("/v1/cluster", json=wrong)).status_code == 400
        grpc_port = router.router.admin.grpc_port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            found = await ClusterStub(channel).GetCluster(cluster_pb2.GetClusterRequest())
        assert {pool.name: pool.wanted for pool in found.pools}["small.decode"] == 1
        pools = {worker.worker_id: worker.pool for worker in found.workers}
        assert pools["small.decode-0"] == "small.decode"
    finally:
        await controller.close()


async def test_sizes_of_several_models_are_set_together_or_not_at_all(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    controller = Controller(router, small)
    try:
        await controller.write(1)
        await eventually(lambda: all(m.view.pools_json for m in router.router.served))
        answer = await router.admin.post("/v1/cluster", json={"decode": 4, "small.decode": 100})
        assert answer.status_code == 400
        assert "small.decode" in answer.json()["error"]["message"]
        assert await router.router.view.redis.llen(f"{controller._key}:scale") == 0
    finally:
        await controller.close()


async def test_usage_and_the_prefix_tree_are_counted_for_all_models_together(
    router: RunningRouter, small: ScriptedWorker
) -> None:
    small.script = saying([2000])
    assert (await chat(router, model="small-one")).status_code == 200
    lines = (await router.admin.get("/metrics")).text.splitlines()
    for name in ("tandem_tenant_requests_total", "tandem_prefix_lookups_total"):
        found = [line for line in lines if line.startswith(name)]
        assert found
        assert not any("model_name" in line for line in found)
    failed = [line for line in lines if line.startswith("tandem_prefix_lookups_failed_total")]
    assert len(failed) == 2


async def test_no_adapter_has_the_name_of_another_model(router: RunningRouter) -> None:
    body = {"lora_name": "small-one", "lora_path": "/x"}
    answer = await router.admin.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert "the name of a model" in answer.text


async def test_two_models_with_one_name_are_refused(router: RunningRouter) -> None:
    models = router.router.models
    second = list(models)[1]
    name = second.config.served_model_name
    second.config = dataclasses.replace(second.config, served_model_name="tiny")
    try:
        with pytest.raises(ConfigError, match="two models have the name 'tiny'"):
            models.check_names()
    finally:
        second.config = dataclasses.replace(second.config, served_model_name=name)
