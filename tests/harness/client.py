"""Calls to a cluster and its workers for tests: completions by token ids, and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from tandem.router.request.migration_budget import MigrationReason
from tests.harness.cluster import LocalCluster, Served, wait_for

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "golden_smollm2.json").read_text()
)["entries"]
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    cached_tokens: int
    finish_reason: str


async def complete(
    client: httpx.AsyncClient, prompt_token_ids: Sequence[int], **fields: Any
) -> Answer:
    """Runs one completion, greedy by default. Raises on any status but 200."""
    body = {
        "prompt": list(prompt_token_ids),
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choice = answer["choices"][0]
    details = answer["usage"]["prompt_tokens_details"]
    return Answer(
        choice["token_ids"], choice["text"], details["cached_tokens"], choice["finish_reason"]
    )


def open_client(cluster: Served) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=512)
    return httpx.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S, limits=limits)


async def complete_all(
    cluster: Served, prompts: Sequence[Sequence[int]], **fields: Any
) -> list[Answer]:
    """Runs all completions concurrently."""
    async with open_client(cluster) as client:
        return list(await asyncio.gather(*(complete(client, p, **fields) for p in prompts)))


def golden(*numbers: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts and their 64 greedy tokens for these reference entries; by default for
    all."""
    entries = [GOLDEN[n] for n in numbers] if numbers else GOLDEN
    return [e["prompt_token_ids"] for e in entries], [e["greedy_token_ids"] for e in entries]


# A request with all fields that edit logits, report log probabilities, or change the text.
EDITED: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "seed": 7,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.1,
    "logit_bias": {"253": 2.0, "28": -100},
    "bad_words": ["the", "is"],
    "min_tokens": 8,
    "logprobs": 5,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}


async def complete_choice(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Runs a completion, greedy by default, and returns its only choice."""
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def metric(cluster: Served, worker_id: str, name: str, **labels: str) -> float:
    """Sums a worker's samples of this metric whose labels match; 0 if there are none."""
    address = cluster.records()[worker_id]["metrics_address"]
    return metric_at(f"http://{address}", name, **labels)


def metric_at(url: str, name: str, **labels: str) -> float:
    """As `metric`, of the process that answers at `url`."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def wait_published(cluster: LocalCluster) -> None:
    """Waits until the workers are idle, and the prefix tree and the routers' replicas of it have
    all blocks in the workers' pools."""
    cluster.wait_idle()

    def published() -> bool:
        lags = [
            metric(cluster, worker_id, "tandem_index_lag_blocks") for worker_id in cluster.workers
        ]
        if any(lags):
            return False
        with Redis.from_url(cluster.redis.url) as redis:
            buckets = redis.scan_iter(f"{{tandem:{cluster.cluster_id}:*}}:prefix:b:*", count=5000)
            num_blocks = sum(int(redis.hlen(bucket)) for bucket in buckets)
        return all(
            metric_at(url, "tandem_prefix_replica_entries") == num_blocks
            for url in cluster.admin_urls
        )

    wait_for(published, deadline_s=30, what="publication of all blocks")


def migrations(cluster: Served, reason: MigrationReason) -> int:
    """Counts the requests that migrated for this reason, by the metrics of the router and of its
    gRPC replica."""
    texts = [httpx.get(f"{url}/metrics", timeout=10).text for url in cluster.admin_urls]
    return sum(
        round(sample.value)
        for text in texts
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "tandem_request_migrations_total" and sample.labels["reason"] == reason
    )


async def stream_completion(
    client: httpx.AsyncClient, prompt_token_ids: Sequence[int], **fields: Any
) -> AsyncIterator[dict[str, Any]]:
    """Streams one completion and yields its events. Closing the iterator disconnects."""
    body = {
        "prompt": list(prompt_token_ids),
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        **fields,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def tokens_of(events: Iterable[dict[str, Any]]) -> list[int]:
    """Collects all token ids in the events of a streamed completion."""
    return [
        token
        for event in events
        for choice in event.get("choices", ())
        for token in choice.get("token_ids") or ()
    ]
