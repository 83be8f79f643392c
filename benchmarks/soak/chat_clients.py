"""Turns of chats, over HTTP and over gRPC, some of whose clients leave in the middle."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass
from random import Random

import grpc.aio
import httpx

from benchmarks.shared.chats import SYSTEMS, WORDS
from tandem.client import InferenceStub
from tandem.client import inference as pb

REQUEST_DEADLINE_S = 120.0
TURNS_MAX = 6
IDLE_MAX = 128  # chats that may go on
LEAVE_SHARE = 0.1
LEAVE_WITHIN_S = 2.0


@dataclass(eq=False)
class Conversation:
    messages: list[dict[str, str]]
    num_turns: int = 0


class Clients:
    """Turns of chats, over both APIs; `outcomes` counts what became of them."""

    def __init__(self, http: httpx.AsyncClient, inference: InferenceStub, seed: int) -> None:
        self._http = http
        self._inference = inference
        self._rng = Random(f"soak {seed}")
        self._number = itertools.count()
        self._idle: list[Conversation] = []
        self.outcomes: Counter[str] = Counter()
        self.ttft_s: list[float] = []
        self.num_open = 0

    async def turn(self, *, may_leave: bool = True) -> None:
        """One turn of a chat that is new, or was idle."""
        rng, self.num_open = self._rng, self.num_open + 1
        if self._idle and rng.random() < 0.7:
            chat = self._idle.pop(rng.randrange(len(self._idle)))
        else:
            chat = Conversation([{"role": "system", "content": rng.choice(SYSTEMS)}])
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(10, 80)))
        chat.messages.append({"role": "user", "content": f"{next(self._number)}: {words}?"})
        max_tokens = rng.randrange(16, 65)
        leaves = may_leave and rng.random() < LEAVE_SHARE
        leave_after_s = rng.uniform(0.0, LEAVE_WITHIN_S) if leaves else REQUEST_DEADLINE_S
        api = rng.choice(("http", "grpc"))
        ask = self._over_http if api == "http" else self._over_grpc
        outcome = "ended"
        try:
            async with asyncio.timeout(leave_after_s):
                text = await ask(chat, max_tokens)
            chat.messages.append({"role": "assistant", "content": text})
            chat.num_turns += 1
            if chat.num_turns < TURNS_MAX and len(self._idle) < IDLE_MAX:
                self._idle.append(chat)
        except TimeoutError:
            outcome = "left" if leaves else "hung"
        except httpx.HTTPStatusError as error:
            outcome = f"status {error.response.status_code}"
        except grpc.aio.AioRpcError as error:
            outcome = error.code().name
        except (httpx.HTTPError, ValueError) as error:
            outcome = type(error).__name__
        finally:
            self.num_open -= 1
        self.outcomes[f"{api}: {outcome}"] += 1

    async def _over_http(self, chat: Conversation, max_tokens: int) -> str:
        body = {
            "messages": chat.messages,
            "max_tokens": max_tokens,
            "temperature": 0.8,
            "ignore_eos": True,
            "stream": True,
        }
        sent, text, is_whole = time.perf_counter(), "", False
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    is_whole = True
                elif line.startswith("data: {"):
                    if not text:
                        self.ttft_s.append(time.perf_counter() - sent)
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    text += event["choices"][0]["delta"].get("content") or " "
        if not is_whole:
            raise ValueError("the stream was cut off")
        return text

    async def _over_grpc(self, chat: Conversation, max_tokens: int) -> str:
        request = pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(**message) for message in chat.messages]),
            sampling=pb.SamplingParams(temperature=0.8),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        sent, text = time.perf_counter(), ""
        async for reply in self._inference.Generate(request):
            if not text:
                self.ttft_s.append(time.perf_counter() - sent)
            text += reply.text
        return text or " "
