"""The sampling of requests that leave it to the model, in every API."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tandem.api.served_model import load_model
from tandem.common.config.answers import AnswerConfig
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.errors import ConfigError
from tandem.models.source import resolve
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

DEFAULTS = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 20,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
}
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PATHS: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "Hi"},
}


def with_generation_config(folder: Path, **values: Any) -> Path:
    """Makes `folder`: the built-in model with another generation_config.json."""
    folder.mkdir()
    for file in resolve("smollm2").path.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **values}))
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return with_generation_config(folder, do_sample=False, max_new_tokens=1, **DEFAULTS)


def sampled(router: RunningRouter) -> dict[str, Any]:
    """Returns the sampling of the only request that a worker got."""
    (submit,) = router.submitted
    sampling = submit.input.sampling  # type: ignore[attr-defined]
    for worker in router.workers:
        worker.submitted.clear()
    return {name: getattr(sampling, name) for name in DEFAULTS}


@pytest.mark.parametrize("path", PATHS)
async def test_what_a_body_leaves_out_is_the_models(router: RunningRouter, path: str) -> None:
    router.script(saying([1000, 2], finish_reason="stop"))
    for own in ({}, {"temperature": None}, {"temperature": 1.0}, {"temperature": 0, "top_p": 0.5}):
        answer = await router.http.post(path, json={"model": "tiny", **PATHS[path], **own})
        assert answer.status_code == 200, answer.text
        wanted = DEFAULTS | {name: value for name, value in own.items() if value is not None}
        assert sampled(router) == wanted
        if path == "/v1/responses":
            told = answer.json()
            assert (told["temperature"], told["top_p"]) == (wanted["temperature"], wanted["top_p"])


async def test_over_grpc(router: RunningRouter) -> None:
    router.script(saying([1000, 2], finish_reason="stop"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        for own in ({}, {"temperature": 1.0}, {"top_k": 0, "min_p": 0.0}):
            request = pb.GenerateRequest(text="Hi", max_tokens=4, sampling=pb.SamplingParams(**own))
            async for _ in InferenceStub(channel).Generate(request, timeout=20):
                pass
            assert sampled(router) == DEFAULTS | own


async def test_completions_of_one_prompt_and_the_best_of_several(router: RunningRouter) -> None:
    router.script(saying([1000, 2], finish_reason="stop"))
    for fields in ({"n": 2}, {"n": 1, "best_of": 2}):
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2, **fields}
        assert (await router.http.post("/v1/completions", json=body)).status_code == 200
        for submit in router.submitted:
            sampling = submit.input.sampling  # type: ignore[attr-defined]
            assert {name: getattr(sampling, name) for name in DEFAULTS} == DEFAULTS


async def test_beams_draw_nothing(router: RunningRouter) -> None:
    router.script(saying([1000, 2], finish_reason="stop"))
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 1, "n": 2, "use_beam_search": True}
    await router.http.post("/v1/completions", json=body)
    for submit in router.submitted:
        sampling = submit.input.sampling  # type: ignore[attr-defined]
        assert (sampling.temperature, sampling.repetition_penalty) == (0.0, 1.0)


async def test_the_model_tells_its_defaults(router: RunningRouter) -> None:
    model = (await router.http.get("/v1/models/tiny")).json()
    assert model["sampling_defaults"] == DEFAULTS


def config(folder: Path, **answers: Any) -> RouterConfig:
    cluster = ClusterConfig("c", "redis://127.0.0.1:1", "a-token-for-tests")
    return RouterConfig(cluster=cluster, model=str(folder), answers=AnswerConfig(**answers))


async def test_an_option_ignores_the_models_values(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert load_model(config(model_folder)).sampling == DEFAULTS
    assert "min_p 0.25, repetition_penalty 1.5, temperature 0.5, top_k 20" in caplog.text
    folder = with_generation_config(tmp_path / "model", temperature=5)
    with pytest.raises(ConfigError, match=r"json: temperature must be .*; it is 5"):
        load_model(config(folder))
    assert load_model(config(folder, generation_config="none")).sampling == {}
