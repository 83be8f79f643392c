"""Short chats for SmolLM2, sent at their times, and what their clients saw of them.

A chat has one of four system prompts (about 40 tokens), a question of 20 to 200 words, and 16 to 64
tokens to make. The same seed gives the same chats; `run` marks them, so that nothing but the
system prompt is cached from the run before.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

QUESTIONS = (
    "river table green window seven music paper stone garden winter letter bridge coffee morning "
    "engine cloud silver market friend shadow forest number island kitchen mirror ocean pencil "
    "question rocket summer ticket umbrella village weather yellow zebra answer basket candle"
)
WORDS = QUESTIONS.split()
SYSTEMS = tuple(
    f"You are {role}. Answer in whole sentences, be brief, name no sources, and when you do not "
    "know something then say so at once and ask for what you lack."
    for role in ("a patient teacher", "a travel agent", "a careful editor", "a cook")
)


@dataclass(frozen=True)
class Chat:
    at_s: float  # after the start, at one chat a second
    messages: tuple[dict[str, str], ...]
    max_tokens: int
    tenant: str = ""


@dataclass
class Seen:
    """The answer to one request. Times are seconds after it was sent."""

    sent_at_s: float  # after the start
    tenant: str = ""
    status: int = 0
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    retry_after_s: int = 0
    error: str = ""
    text: str = ""

    @property
    def tpot_s(self) -> float:
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else 0.0


def chats(
    seed: int, run: str, tenants: Sequence[tuple[str, float]] = (("", 1.0),)
) -> Iterator[Chat]:
    """Without end; Poisson arrivals, one a second. `tenants`: names, and their shares of it."""
    rng = Random(f"chats {seed}")
    names, shares = [name for name, _ in tenants], [share for _, share in tenants]
    at_s = 0.0
    number = 0
    while True:
        at_s += rng.expovariate(1.0)
        number += 1
        question = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(20, 200)))
        yield Chat(
            at_s,
            (
                {"role": "system", "content": rng.choice(SYSTEMS)},
                {"role": "user", "content": f"{run} {number}: what do you make of {question}?"},
            ),
            rng.randrange(16, 65),
            rng.choices(names, shares)[0],
        )


async def ask(client: httpx.AsyncClient, chat: Chat, *, began: float) -> Seen:
    """`began`: perf_counter() of the start."""
    body = {
        "messages": chat.messages,
        "max_tokens": chat.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,  # so that each token is one event, text or not
    }
    headers = {"x-tandem-tenant": chat.tenant} if chat.tenant else {}
    sent = last = time.perf_counter()
    seen = Seen(sent - began, chat.tenant)
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as answer:
            seen.status = answer.status_code
            if answer.status_code != 200:
                seen.error = json.loads(await answer.aread())["error"]["code"]
                seen.retry_after_s = int(answer.headers.get("retry-after", 0))
            else:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    num_tokens, text = _news(json.loads(line.removeprefix("data: ")), seen)
                    seen.text += text
                    if num_tokens and not seen.ttft_s:
                        seen.ttft_s = now - sent
                        num_tokens -= 1
                        last = now
                    if num_tokens:
                        seen.gaps_s += [(now - last) / num_tokens] * num_tokens
                        last = now
    except httpx.HTTPError as error:
        seen.error = repr(error)
    seen.ended_s = time.perf_counter() - sent
    return seen


def _news(event: dict[str, Any], seen: Seen) -> tuple[int, str]:
    """Tokens and text of one event."""
    if "error" in event:
        seen.error = event["error"]["code"]
    num_tokens, text = 0, ""
    for choice in event.get("choices", ()):
        num_tokens += len(choice.get("token_ids") or ())
        text += choice["delta"].get("content") or ""
    return num_tokens, text


class LoopLag:
    """Measures how late this process's own event loop is. A client whose loop is late measures
    itself."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self.cpu_share = 0.0

    async def __aenter__(self) -> LoopLag:
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self.cpu_share = (time.process_time() - self._cpu) / (time.perf_counter() - self._began)

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + 0.02
            await asyncio.sleep(0.02)
            self.lags_s.append(time.perf_counter() - due)
