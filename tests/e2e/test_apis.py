"""The other APIs say what the chat says: OpenAI's responses and Anthropic's messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest

from tandem.client import InferenceStub
from tandem.client import inference as pb
from tests.conformance.run_clients import CLIENTS, check
from tests.harness.cluster import LocalCluster

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def ask_chat(cluster: LocalCluster) -> Any:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    return client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=30, temperature=0
    )


def test_anthropics_client_streams_the_words_of_the_chat(cluster: LocalCluster) -> None:
    answer = ask_chat(cluster)
    client = anthropic.Anthropic(base_url=cluster.url, api_key="none")
    with client.messages.stream(
        model=MODEL, messages=QUESTION, max_tokens=30, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == answer.choices[0].message.content
    usage = message.usage
    num_prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert num_prompt == answer.usage.prompt_tokens
    assert usage.output_tokens == answer.usage.completion_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == num_prompt
    cluster.wait_idle()


def test_responses_have_the_words_of_the_chat(cluster: LocalCluster) -> None:
    answer = ask_chat(cluster)
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    asked: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": 30}
    asked |= {"temperature": 0, "top_logprobs": 2}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        parts = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert whole.output_text == "".join(parts) == answer.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.input_tokens == answer.usage.prompt_tokens
    assert whole.usage.output_tokens == answer.usage.completion_tokens
    part = whole.output[0].content[0]  # type: ignore[union-attr,index]
    told = part.logprobs or []  # type: ignore[union-attr]
    assert "".join(one.token for one in told) == whole.output_text
    assert {len(one.top_logprobs) for one in told} == {2}
    cluster.wait_idle()


def test_embeddings_are_the_same_however_they_are_asked(cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    texts = [
        "The capital of France is Paris, which lies on the river Seine.",
        "Paris, on the river Seine, is the capital city of France.",
        "def add(a, b):\n    return a + b  # sums up two numbers",
    ]
    together = client.embeddings.create(model=MODEL, input=texts)
    alone = [client.embeddings.create(model=MODEL, input=text) for text in texts]
    as_floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    vectors = [one.embedding for one in together.data]
    asked = pb.EmbedRequest(input=[pb.EmbedInput(text=text) for text in texts])
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        over_grpc = [list(m.embedding) for m in InferenceStub(channel).Embed(asked, timeout=60)]
    assert over_grpc == vectors
    for index, vector in enumerate(vectors):
        assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-5)
        assert alone[index].data[0].embedding == vector
        assert as_floats.data[index].embedding == pytest.approx(vector, abs=1e-7)
    similar, other = (
        sum(a * b for a, b in zip(vectors[0], vectors[index], strict=True)) for index in (1, 2)
    )
    assert similar > other
    cluster.wait_idle()


@pytest.mark.parametrize(("library", "num_checks"), [("openai", 11), ("anthropic", 7)])
def test_client_library_passes_its_checks(
    cluster: LocalCluster, library: str, num_checks: int
) -> None:
    """`tests/conformance/run_clients.py` runs these and more, with the newest versions."""
    client = CLIENTS / f"use_{library}.py"
    told = check(client, Path(sys.executable), cluster.url, MODEL)
    assert [line for line in told if not line.startswith("passed ")] == []
    assert len(told) == num_checks
    cluster.wait_idle()
