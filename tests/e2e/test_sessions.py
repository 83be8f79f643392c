"""Turns of sessions stay where their KV is, and conversations of an agent share their beginning."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import httpx
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.e2e.test_many import Tiny, serve_tiny
from tests.harness.client import open_client, wait_published

NUM_SESSIONS = 8
NUM_TURNS = 4
TOKENIZER_SIZE = 49_152  # of SmolLM2's tokenizer, which the tiny model has
WORDS = ["river", "table", "green", "window", "seven", "music", "paper", "stone", "garden"]


@pytest.fixture(scope="module")
def tiny(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder = tmp_path_factory.mktemp("sessions")
    sizes = {"num_blocks": 800, "prefill": 1, "decode": 2}
    with serve_tiny(redis_server, folder, **sizes, vocabulary=TOKENIZER_SIZE) as started:
        yield started


@dataclass
class Session:
    """A conversation whose next prompt is its last one, the answer to it, and more tokens."""

    name: str
    rng: Random
    history: list[int] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)  # the decode worker of each turn
    num_cached: int = 0  # tokens of the later turns' prompts
    num_cacheable: int = 0

    async def take_turn(self, client: httpx.AsyncClient) -> None:
        cacheable = max(0, len(self.history) - 1) // 16 * 16
        rng = self.rng
        prompt = [*self.history, *(rng.randrange(100, 900) for _ in range(rng.randrange(40, 120)))]
        body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        headers = {"x-claude-code-session-id": self.name, "x-tandem-placement": "1"}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        placed = re.search(r"decode=(\S+)", answer.headers["x-tandem-placement"])
        assert placed is not None
        self.workers.append(placed[1])
        if self.history:
            self.num_cacheable += cacheable
            self.num_cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.history = [*prompt, *reply["choices"][0]["token_ids"]]


async def test_turns_stay_on_their_decode_worker(tiny: Tiny) -> None:
    drawn = Random()  # so that a second try of this test finds nothing cached
    sessions = [Session(f"session {n}", Random(drawn.random())) for n in range(NUM_SESSIONS)]
    async with open_client(tiny.cluster) as client:
        await asyncio.gather(*(session.take_turn(client) for session in sessions))
        # Later turns come one after another: while a worker has much to do, its sessions may move.
        for _ in range(NUM_TURNS - 1):
            for session in sessions:
                await asyncio.to_thread(wait_published, tiny.cluster)
                await session.take_turn(client)
    moves = sum(a != b for session in sessions for a, b in pairwise(session.workers))
    assert moves <= 0.1 * NUM_SESSIONS * (NUM_TURNS - 1)
    assert {session.workers[0] for session in sessions} == {"decode-0", "decode-1"}
    cached = sum(session.num_cached for session in sessions)
    assert cached >= 0.99 * sum(session.num_cacheable for session in sessions)


def conversation(number: int, question: str) -> dict[str, Any]:
    """The shape of Claude Code's first request, with filler instead of its prose."""
    rng = Random("filler")

    def filler(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    marked = {"cache_control": {"type": "ephemeral"}}
    billing = (
        f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number};"
    )
    return {
        "model": "",
        "max_tokens": 4,
        "metadata": {"user_id": f"user_9f_account__session_{number}"},
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": filler(12), **marked},
            {"type": "text", "text": filler(700), **marked},
        ],
        "tools": [
            {
                "name": f"Tool{index}",
                "description": filler(30),
                "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
            }
            for index in range(6)
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": f"<system-reminder>{filler(20)}</system-reminder>"},
                    {"type": "text", "text": question},
                ],
            }
        ],
    }


async def test_a_second_conversation_of_claude_code_reads_the_system_prompt_from_the_cache(
    tiny: Tiny,
) -> None:
    async with open_client(tiny.cluster) as client:
        await client.post("/v1/messages", json=conversation(1, "What is in this folder?"))
        wait_published(tiny.cluster)
        second = conversation(2, "Which tests fail?")
        answer = await client.post("/v1/messages", json=second)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        bare = {
            **{name: second[name] for name in ("model", "system", "tools")},
            "messages": [{"role": "user", "content": "x"}],
        }
        counted = (await client.post("/v1/messages/count_tokens", json=bare)).json()["input_tokens"]
    assert counted > 700
    assert usage["cache_read_input_tokens"] >= 0.95 * counted


async def test_why_names_an_early_difference(tiny: Tiny) -> None:
    same = [Random("same").randrange(100, 900) for _ in range(400)]
    async with open_client(tiny.cluster) as client:
        for counter in (50, 51):
            prompt = [*range(100, 120), counter, *same]
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            request_id = answer.json()["id"]
        record = (await client.get(f"/v1/requests/{request_id}")).json()
    assert "differs from token 21 on from a prompt seen" in record["placement_sentence"]
