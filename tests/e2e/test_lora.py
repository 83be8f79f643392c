"""Adapters are loaded, replaced and unloaded under load, and refused by name, over both APIs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.models.source import read_folder
from tandem.net.rpc.tandem.v1 import cluster_pb2, inference_pb2
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.client import metric
from tests.harness.cluster import LocalCluster, free_port
from tests.lora_adapters import write_adapter
from tests.parity.models import make_random_model

_SHORT, _LONG = list(range(1000, 1010)), list(range(2000, 2100))


class Adapters:
    """A cluster of one prefill and one decode worker, and folders of adapters."""

    def __init__(self, redis: EmbeddedRedis, folder: Path) -> None:
        (folder / "model").mkdir()
        make_random_model(folder / "model")
        self.folder = folder
        self.config = read_folder(folder / "model").config
        self.admin_grpc_port = free_port()
        self.cluster = LocalCluster(redis, folder, str(folder / "model"))
        self.cluster.options = (
            *self.cluster.options,
            *("--max-loras", "2", "--max-lora-rank", "8"),
            *("--prefill-at", "remote", "--local-prefill-max-tokens", "16"),
        )
        self.cluster.router_options = (
            *self.cluster.router_options,
            *("--admin-grpc-port", str(self.admin_grpc_port)),
        )

    def write(self, name: str, seed: int = 1, **settings: Any) -> Path:
        write_adapter(self.folder / name, self.config, seed=seed, scale=0.4, **settings)
        return self.folder / name

    async def admin(self, call: str, *, public: bool = False, **body: Any) -> httpx.Response:
        url = self.cluster.url if public else self.cluster.admin_url
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return await client.post(f"/v1/{call}_lora_adapter", json=body)

    async def load(self, name: str, path: Path, **more: Any) -> None:
        reply = await self.admin("load", lora_name=name, lora_path=str(path), **more)
        assert reply.status_code == 200, reply.text
        assert reply.text == f"Success: LoRA adapter '{name}' added successfully."

    async def ask(self, model: str, prompt: list[int] = _SHORT) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=self.cluster.url, timeout=60) as client:
            return await client.post("/v1/completions", json=body)

    async def tokens(self, model: str, prompt: list[int] = _SHORT) -> list[int]:
        reply = await self.ask(model, prompt)
        assert reply.status_code == 200, reply.text
        token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return token_ids


@pytest.fixture(scope="module")
def adapters(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Adapters]:
    made = Adapters(redis_server, tmp_path_factory.mktemp("lora"))
    with closing(made.cluster):
        made.cluster.start(prefill=1, decode=1)
        yield made
        made.cluster.wait_idle()


async def test_loaded_replaced_and_unloaded_under_load(adapters: Adapters) -> None:
    base = await adapters.tokens("model")
    await adapters.load("a", adapters.write("a", 1))
    await adapters.load("b", adapters.write("b", 2))
    expected = {"model": base, "a": await adapters.tokens("a"), "b": await adapters.tokens("b")}
    assert len(set(map(tuple, expected.values()))) == 3
    stop = asyncio.Event()

    async def keep_asking(name: str) -> int:
        num = 0
        while not stop.is_set():
            assert await adapters.tokens(name) == expected[name]
            num += 1
        return num

    asking = [asyncio.create_task(keep_asking(name)) for name in ("model", "a", "b")]
    for seed in (3, 4):  # more than there are slots for: the idle one is read again
        await adapters.load("c", adapters.write("c", seed), load_inplace=True)
        others = await adapters.tokens("c")
        assert others not in expected.values()
    reply = await adapters.admin("unload", lora_name="c")
    assert reply.text == "Success: LoRA adapter 'c' removed successfully."
    gone = await adapters.ask("c")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    stop.set()
    assert min(await asyncio.gather(*asking)) > 0


async def test_one_that_a_prefill_worker_cannot_read_is_prefilled_elsewhere(
    adapters: Adapters,
) -> None:
    """The decode worker has it in memory; its files are gone before the other one wants them."""
    path = adapters.write("fleeting", 7)
    await adapters.load("fleeting", path)
    short = await adapters.tokens("fleeting")
    shutil.rmtree(path)
    assert await adapters.tokens("fleeting") == short
    before = metric(adapters.cluster, "decode-0", "tandem_local_prefills_total")
    assert (await adapters.ask("fleeting", _LONG)).status_code == 200
    assert metric(adapters.cluster, "decode-0", "tandem_local_prefills_total") > before
    await adapters.admin("unload", lora_name="fleeting")


async def test_one_that_nobody_can_read_is_unavailable(adapters: Adapters) -> None:
    path = adapters.write("changed", 8)
    await adapters.load("changed", path)
    adapters.write("changed", 9)
    reply = await adapters.ask("changed")
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "adapter_unavailable"
    assert "in its folder have changed" in reply.text
    async with httpx.AsyncClient(base_url=adapters.cluster.url) as client:
        listed = await client.get("/v1/models")
    assert {each["id"]: each["root"] for each in listed.json()["data"]}["changed"] == "changed"
    assert str(path.parent) not in reply.text + listed.text
    await adapters.load("changed", path, load_inplace=True)
    await adapters.tokens("changed")
    await adapters.admin("unload", lora_name="changed")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided"),
        ({"lora_name": "x", "lora_path": "there"}, 400, "must be an absolute path"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, 400, "has no adapter_config.json"),
        ({"lora_name": "model", "lora_path": "GOOD"}, 400, "which is the name of a model"),
        ({"lora_name": "a b", "lora_path": "GOOD"}, 400, "letters, digits"),
        ({"lora_name": "x", "lora_path": "DORA"}, 400, "use_dora is True"),
        ({"lora_name": "x", "lora_path": "RANK"}, 400, "max-lora-rank allows at most 8"),
        ({"lora_name": "x", "lora_path": "REDOS"}, 400, "cannot be matched in 1 s"),
        (
            {"lora_name": "x", "lora_path": "GOOD", "rank": 8},
            400,
            "the body has the unknown field 'rank'",
        ),
        ({"lora_name": 5, "lora_path": "GOOD"}, 400, "lora_name must be a string"),
    ],
)
async def test_what_cannot_be_loaded_is_refused(
    body: dict[str, Any], status: int, message: str, adapters: Adapters
) -> None:
    paths = {
        "GOOD": adapters.write("good"),
        "DORA": adapters.write("dora", use_dora=True),
        "RANK": adapters.write("rank", r=9),
        "REDOS": adapters.write("redos", rank_pattern={"([a-z]+|[a-z_.0-9]+)+!": 4}),
    }
    if body.get("lora_path") in paths:
        body = body | {"lora_path": str(paths[body["lora_path"]])}
    reply = await adapters.admin("load", **body)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]


async def test_the_public_port_has_no_such_calls(adapters: Adapters) -> None:
    for call in ("load", "unload"):
        reply = await adapters.admin(call, public=True, lora_name="x", lora_path="/x")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_public")
    reply = await adapters.admin("unload", lora_name="never")
    assert reply.status_code == 404


async def test_both_apis_over_grpc(adapters: Adapters) -> None:
    path = adapters.write("wired", 5)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{adapters.admin_grpc_port}") as channel:
        operator = ClusterStub(channel)  # type: ignore[no-untyped-call]
        request = cluster_pb2.LoadLoraAdapterRequest(lora_name="wired", lora_path=str(path))
        assert len((await operator.LoadLoraAdapter(request)).digest) == 32
        with pytest.raises(grpc.aio.AioRpcError, match="already been loaded"):
            await operator.LoadLoraAdapter(request)
        port = adapters.cluster.grpc_port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as public:
            user = InferenceStub(public)  # type: ignore[no-untyped-call]
            listed = (await user.ListModels(inference_pb2.ListModelsRequest())).models
            assert ("wired", "model") in [(model.id, model.parent) for model in listed]
            assert await _generate(user, "wired") == await adapters.tokens("wired")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await _generate(user, "nobody")
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        gone = cluster_pb2.UnloadLoraAdapterRequest(lora_name="wired")
        await operator.UnloadLoraAdapter(gone)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await operator.UnloadLoraAdapter(gone)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def _generate(user: InferenceStub, model: str) -> list[int]:
    request = inference_pb2.GenerateRequest(
        model=model,
        token_ids=inference_pb2.TokenIds(ids=_SHORT),
        max_tokens=8,
        sampling=inference_pb2.SamplingParams(temperature=0),
        ignore_eos=True,
    )
    return [token_id async for delta in user.Generate(request) for token_id in delta.token_ids]
