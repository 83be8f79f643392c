"""The Python API makes what the HTTP API makes: the same model, requests and seeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tandem import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from tests.harness.client import DEADLINE_S
from tests.harness.cluster import LocalCluster

PROMPTS = ["Gravity is", "The three primary colors are red,"]
MESSAGES = [{"role": "user", "content": "Name a color."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The model in the cluster's numerics, where a sequence's tokens depend on no other one."""
    settings = {"device": "cpu", "numerics": "invariant", "num_threads": 1}
    with LLM("smollm2", num_gpu_blocks_override=256, **settings) as made:
        yield made


def post(cluster: LocalCluster, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{cluster.url}/v1/{path}", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def facts(output: CompletionOutput) -> tuple[Any, ...]:
    return output.text, output.token_ids, output.finish_reason, output.stop_reason


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
        {"temperature": 1.1, "seed": 11, "n": 3},
        {"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.3, "min_tokens": 9},
        {"temperature": 0, "stop": [" the", ","], "include_stop_str_in_output": True},
        {"temperature": 0, "bad_words": ["fundamental"], "logit_bias": {7042: -100.0}},
    ],
    ids=["greedy", "drawn", "several", "penalties", "stop", "biased"],
)
def test_completions_are_those_of_the_http_api(
    cluster: LocalCluster, llm: LLM, fields: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=12, **fields)
    outputs = [facts(one) for each in llm.generate(PROMPTS, params) for one in each.outputs]
    sent = {**fields, "logit_bias": {str(k): v for k, v in fields.get("logit_bias", {}).items()}}
    body = post(
        cluster, "completions", prompt=PROMPTS, max_tokens=12, return_token_ids=True, **sent
    )
    assert outputs == [
        (one["text"], one["token_ids"], one["finish_reason"], one["stop_reason"])
        for one in body["choices"]
    ]


def test_chats_are_those_of_the_http_api(cluster: LocalCluster, llm: LLM) -> None:
    form = {"choice": ["ultramarine", "vermilion"]}
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 12}
    [plain] = llm.chat(MESSAGES, SamplingParams(**fields))
    params = SamplingParams(**fields, structured_outputs=StructuredOutputsParams(**form))
    [formed] = llm.chat(MESSAGES, params)
    for output, more in ((plain, {}), (formed, {"structured_outputs": form})):
        body = post(cluster, "chat/completions", messages=MESSAGES, **fields, **more)
        [choice] = body["choices"]
        assert output.outputs[0].text == choice["message"]["content"]
        assert output.outputs[0].finish_reason == choice["finish_reason"]
        assert len(output.prompt_token_ids) == body["usage"]["prompt_tokens"]


def test_log_probabilities_are_those_of_the_http_api(cluster: LocalCluster, llm: LLM) -> None:
    fields = {"temperature": 0, "max_tokens": 6, "logprobs": 3, "prompt_logprobs": 2}
    [output] = llm.generate(PROMPTS[0], SamplingParams(**fields))
    [choice] = post(cluster, "completions", prompt=PROMPTS[0], **fields)["choices"]
    entries = output.outputs[0].logprobs
    assert entries is not None
    assert [next(iter(entry.values())).logprob for entry in entries] == choice["logprobs"][
        "token_logprobs"
    ]
    assert output.prompt_logprobs is not None
    for own, sent in zip(output.prompt_logprobs, choice["prompt_logprobs"], strict=True):
        if own is None:
            assert sent is None
            continue
        assert {str(token_id): (one.logprob, one.rank) for token_id, one in own.items()} == {
            token_id: (one["logprob"], one["rank"]) for token_id, one in sent.items()
        }


def test_embeddings_are_those_of_the_http_api(cluster: LocalCluster, llm: LLM) -> None:
    data = post(cluster, "embeddings", input=PROMPTS)["data"]
    outputs = llm.embed(PROMPTS)
    assert [output.outputs.embedding for output in outputs] == [one["embedding"] for one in data]
