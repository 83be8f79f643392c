"""Two models behind one router: each answers as it does alone, with pools of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from transformers import PreTrainedModel

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.net.rpc.tandem.v1 import cluster_pb2, inference_pb2
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.client import metric
from tests.harness.cluster import START_DEADLINE_S, LocalCluster, free_port, wait_for
from tests.parity.models import make_random_model

NUM_TOKENS = 12
PROMPTS = [list(range(1000, 1010)), list(range(2000, 2100))]


class TwoModels:
    """A cluster of the models `llama` and `gemma`. Each has a prefill and a decode worker."""

    def __init__(self, redis: EmbeddedRedis, folder: Path) -> None:
        self.folder = folder
        self.models: dict[str, PreTrainedModel] = {}
        for name, family in (("llama", "llama"), ("gemma", "gemma3")):
            (folder / name).mkdir()
            self.models[name] = make_random_model(folder / name, family)
        self.admin_grpc_port = free_port()
        self.cluster = LocalCluster(redis, folder, str(folder / "llama"))
        remote = ("--prefill-at", "remote", "--local-prefill-max-tokens", "16")
        self.cluster.options = [*self.cluster.options, *remote]
        entry = f"{folder / 'gemma'} group=gem served-model-name=gemma"
        self.cluster.router_options = [
            *self.cluster.router_options,
            *("--served-model-name", "llama", "--more-models", entry),
            *("--admin-grpc-port", str(self.admin_grpc_port)),
        ]

    def start(self) -> None:
        for role in ("prefill", "decode"):
            more = ("--group", "gem", "--model", str(self.folder / "gemma"))
            self.cluster.start_worker(f"gem.{role}-0", role, *more)
        self.cluster.start_router()
        for role in ("prefill", "decode"):
            self.cluster.start_worker(f"{role}-0", role)
        # A worker pairs with those of its own model only, so each model is awaited for itself.
        records = self.cluster.records
        wanted = {f"{group}{role}-0" for group in ("", "gem.") for role in ("prefill", "decode")}
        pairs = {"decode-0": {"prefill-0"}, "gem.decode-0": {"gem.prefill-0"}}

        def ready() -> bool:
            found = records()
            return (
                wanted <= found.keys()
                and all(self.cluster.is_ready(self.cluster.workers[name], found) for name in wanted)
                and all(set(found[name]["transports"]) == peers for name, peers in pairs.items())
            )

        wait_for(ready, deadline_s=START_DEADLINE_S, what="both models", interval_s=0.1)

    def expected(self, model: str, prompt: list[int]) -> list[int]:
        """What transformers generates."""
        out = self.models[model].generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.cluster.url}{path}", json=body, timeout=60)

    def ask(self, model: str, prompt: list[int]) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        return self.post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})

    def tokens(self, model: str, prompt: list[int]) -> list[int]:
        reply = self.ask(model, prompt)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert answer["model"] == model
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids


@pytest.fixture(scope="module")
def two(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoModels]:
    made = TwoModels(redis_server, tmp_path_factory.mktemp("two"))
    try:
        made.start()
        yield made
    finally:
        made.cluster.close()


def test_each_model_is_exact_and_pulls_from_its_own_prefill_worker(two: TwoModels) -> None:
    for _ in range(2):  # the second time, the prompts are cached
        for prompt in PROMPTS:
            for model in ("llama", "gemma"):
                assert two.tokens(model, prompt) == two.expected(model, prompt)
    for worker in ("decode-0", "gem.decode-0"):
        assert metric(two.cluster, worker, "tandem_kv_blocks_pulled_total") > 0
    two.cluster.wait_idle()


def test_grpc_serves_both_models(two: TwoModels) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{two.cluster.grpc_port}") as channel:
        stub = InferenceStub(channel)
        listed = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20).models
        assert [each.id for each in listed] == ["llama", "gemma"]
        for model in ("gemma", "llama"):
            request = inference_pb2.GenerateRequest(
                model=model,
                token_ids=inference_pb2.TokenIds(ids=PROMPTS[0]),
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                sampling=inference_pb2.SamplingParams(temperature=0),
            )
            found = [t for each in stub.Generate(request, timeout=60) for t in each.token_ids]
            assert found == two.expected(model, PROMPTS[0])
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(inference_pb2.GenerateRequest(model="other", text="x"), timeout=20))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_request_without_a_model_goes_to_the_first_one(two: TwoModels) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0}
    assert two.post("/v1/completions", body).json()["model"] == "llama"


def test_an_unknown_model_is_refused_by_name(two: TwoModels) -> None:
    reply = two.ask("other", PROMPTS[0])
    assert reply.status_code == 404
    assert "the served models are 'llama', 'gemma'" in reply.json()["error"]["message"]


def test_lists_show_both_models(two: TwoModels) -> None:
    listed = httpx.get(f"{two.cluster.url}/v1/models", timeout=20).json()["data"]
    assert [each["id"] for each in listed] == ["llama", "gemma"]
    one = httpx.get(f"{two.cluster.url}/v1/models/gemma", timeout=20).json()
    assert one["root"] == "gemma"
    state = httpx.get(f"{two.cluster.admin_url}/v1/cluster", timeout=20).json()
    assert [each["model"] for each in state["models"]] == ["llama", "gemma"]
    pools = {name: pool["ready"] for name, pool in state["pools"].items()}
    assert pools == {"prefill": 1, "decode": 1, "gem.prefill": 1, "gem.decode": 1}
    assert {w["worker_id"]: w["pool"] for w in state["workers"]}["gem.decode-0"] == "gem.decode"
    with grpc.insecure_channel(f"127.0.0.1:{two.admin_grpc_port}") as channel:
        found = ClusterStub(channel).GetCluster(cluster_pb2.GetClusterRequest(), timeout=20)
    assert {pool.name for pool in found.pools} == set(pools)


def test_tokens_are_those_of_the_model(two: TwoModels) -> None:
    for model in ("llama", "gemma"):
        body = {"model": model, "prompt": "one two"}
        answer = two.post("/tokenize", body).json()
        limit = two.models[model].config.max_position_embeddings
        assert answer["max_model_len"] == limit


def test_metrics_name_the_model(two: TwoModels) -> None:
    two.tokens("gemma", PROMPTS[0])
    text = httpx.get(f"{two.cluster.admin_url}/metrics", timeout=20).text
    lines = [line for line in text.splitlines() if line.startswith("tandem_requests_total")]
    for model in ("llama", "gemma"):
        assert any(f'model_name="{model}"' in line for line in lines)
    assert text.count("# TYPE tandem_requests_total ") == 1
    assert 'tandem_worker_up{model_name="gemma",role="decode",worker="gem.decode-0"} 1.0' in text
    vllm = httpx.get(f"{two.cluster.admin_url}/metrics?names=vllm", timeout=20).text
    assert vllm.count("# TYPE vllm:prompt_tokens_total ") == 1
    assert 'vllm:prompt_tokens_total{model_name="gemma"}' in vllm


def test_a_worker_is_changed_by_its_name_whatever_its_model_is(two: TwoModels) -> None:
    reply = httpx.post(
        f"{two.cluster.admin_url}/reset_prefix_cache",
        json={"worker_id": "gem.decode-0"},
        timeout=20,
    )
    assert set(reply.json()["dropped_blocks"]) == {"gem.decode-0"}
    reply = httpx.post(f"{two.cluster.admin_url}/reset_prefix_cache", json={}, timeout=20)
    assert len(reply.json()["dropped_blocks"]) == 4
    wrong = httpx.post(
        f"{two.cluster.admin_url}/v1/cluster/workers/none/drain", json={}, timeout=20
    )
    assert wrong.status_code == 404
    assert "gem.decode-0" in wrong.json()["error"]["message"]
