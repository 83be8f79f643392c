"""A client program of a cluster with several routers: it chats until it is stopped.

python -m tests.harness.host_chats ADDRESS,... NUM_CLIENTS FILE

It uses the routers in turn; each prompt has one greedy answer. Each chat is written to FILE as a
line of JSON: begin and end, the router, the answer, and the fault if any. A chat whose router
disconnects or falls silent is sent once more to another router (`retry`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

PROMPTS = [f"Count from {n} and tell me about gravity, please." for n in range(12)]
MAX_TOKENS = 48
SILENCE_S = 30.0  # longer than a router takes to move a stream to another worker
PORT = 8000


@dataclass
class Chat:
    prompt: int
    router: str
    began: float
    retry: bool = False
    ended: float = 0.0
    text: str = ""
    fault: str = ""  # empty if the answer is complete


class Client:
    """Tracks which routers are ready."""

    def __init__(self, addresses: list[str]) -> None:
        timeout = httpx.Timeout(SILENCE_S, connect=3.0)
        self._http = httpx.AsyncClient(timeout=timeout)
        self._addresses = addresses
        self._turn = itertools.count()
        self.ready: list[str] = []
        self.model = ""

    async def watch(self) -> None:
        while True:
            # Concurrently, like a load balancer: a router that does not answer must not hide the
            # others.
            are_ready = await asyncio.gather(*map(self._is_ready, self._addresses))
            self.ready = [
                a for a, is_ready in zip(self._addresses, are_ready, strict=True) if is_ready
            ]
            await asyncio.sleep(0.5)

    async def _is_ready(self, address: str) -> bool:
        try:
            url = f"http://{address}:{PORT}/ready"
            return (await self._http.get(url, timeout=1.0)).status_code == 200
        except httpx.HTTPError:
            return False

    def next_router(self, but: str = "") -> str | None:
        ready = [address for address in self.ready if address != but]
        return ready[next(self._turn) % len(ready)] if ready else None

    async def chat(self, prompt: int, router: str, *, retry: bool = False) -> Chat:
        chat = Chat(prompt, router, time.time(), retry)
        message = {"role": "user", "content": PROMPTS[prompt]}
        body = {"model": self.model, "messages": [message], "max_tokens": MAX_TOKENS}
        body |= {"temperature": 0, "stream": True, "ignore_eos": True}
        url = f"http://{router}:{PORT}/v1/chat/completions"
        try:
            async with self._http.stream("POST", url, json=body) as reply:
                if reply.status_code != 200:
                    chat.fault = f"{reply.status_code} {(await reply.aread())[:300]!r}"
                else:
                    await self._take(reply, chat)
        except httpx.HTTPError as error:
            chat.fault = f"{type(error).__name__} {error}"
        chat.ended = time.time()
        return chat

    async def _take(self, reply: httpx.Response, chat: Chat) -> None:
        is_done = False
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                is_done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                chat.fault = json.dumps(event["error"])[:300]
                return
            for choice in event["choices"]:
                chat.text += choice["delta"].get("content") or ""
        if not is_done:
            chat.fault = "the stream ended early"

    async def take_model(self) -> None:
        while not self.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        reply = await self._http.get(f"http://{self.ready[0]}:{PORT}/v1/models")
        self.model = reply.json()["data"][0]["id"]


async def main(addresses: str, num_clients: str, path: str) -> None:
    client = Client(addresses.split(","))
    watching = asyncio.create_task(client.watch())
    await client.take_model()
    numbers = itertools.count()
    with Path(path).open("a", buffering=1) as out:  # noqa: ASYNC230

        async def run() -> None:
            while True:
                if (router := client.next_router()) is None:
                    await asyncio.sleep(0.1)
                    continue
                prompt = next(numbers) % len(PROMPTS)
                chat = await client.chat(prompt, router)
                print(json.dumps(asdict(chat)), file=out)
                while chat.fault and not chat.retry:
                    if (other := client.next_router(but=router)) is None:
                        await asyncio.sleep(0.1)
                        continue
                    chat = await client.chat(prompt, other, retry=True)
                    print(json.dumps(asdict(chat)), file=out)

        await asyncio.gather(watching, *(run() for _ in range(int(num_clients))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
