"""Tests whether the turns of a session stay on the decode worker that has the session's KV.

    python -m benchmarks.cluster.sessions [--sessions 40] [--turns 6] [--decode 2]

A cluster of `tandem up` with one prefill worker and several decode workers. First, 8 clients send
turns one after another: the turns served a second are the capacity. Then all sessions send turns at
`--load` of the capacity. A turn is the whole history and 20 to 100 new tokens, and asks for 16 to
48 tokens.

Reported of each session's later turns:

    moved    went to another decode worker than the turn before (goal: at most 10%)
    cached   of the tokens in full blocks that the turn before had computed (goal: 99%)

Writes benchmarks/results/sessions.json; exit status 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx

from benchmarks.shared.cluster import up
from benchmarks.shared.requests import client_of, random_prompt
from tandem_bench.framework import RESULTS, Report, options, run_main

BLOCK_SIZE = 16
CLIENTS = 8
MOVED_MOST = 0.1
CACHED_LEAST = 0.99


@options
class Options:
    sessions: int = 40
    turns: int = 6
    decode: int = 2
    """Decode workers."""
    load: float = 0.5
    """Turns a second, as a fraction of the capacity."""
    seed: int = 0
    model: str = ""
    """Model of the cluster. Default: that of `tandem up`."""
    output: Path = RESULTS / "sessions.json"


@dataclass
class Session:
    """A conversation as its client sees it."""

    name: str
    rng: Random
    history: list[int] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    num_cached: int = 0  # over all later turns
    num_cacheable: int = 0

    @property
    def num_moves(self) -> int:
        pairs = zip(self.workers, self.workers[1:], strict=False)
        return sum(one != other for one, other in pairs)

    async def take_turn(self, client: httpx.AsyncClient) -> None:
        computed = max(0, len(self.history) - 1) // BLOCK_SIZE * BLOCK_SIZE
        length = self.rng.randrange(20, 101) if self.history else self.rng.randrange(100, 401)
        prompt = [*self.history, *random_prompt(self.rng, length)]
        body = {
            "prompt": prompt,
            "max_tokens": self.rng.randrange(16, 49),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"x-session-id": self.name, "x-tandem-placement": "1"}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        reply = answer.raise_for_status().json()
        if self.history:
            self.num_cacheable += computed
            self.num_cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        placed = re.search(r"decode=(\S+)", answer.headers["x-tandem-placement"])
        assert placed is not None
        self.workers.append(placed[1])
        self.history = [*prompt, *reply["choices"][0]["token_ids"]]


def main(options: Options = Options()) -> int:
    report = Report(options.output)
    more = ("--model", options.model) if options.model else ()
    sizes = ("--prefill", "1", "--decode", str(options.decode), "--num-blocks", "4000")
    with up(*sizes, *more) as cluster:
        capacity = asyncio.run(measure_capacity(cluster.url, options))
        cluster.wait_idle()
        sessions = asyncio.run(converse(cluster.url, options, options.load * capacity))
    num_later = sum(len(s.workers) - 1 for s in sessions)
    moved = sum(s.num_moves for s in sessions) / max(1, num_later)
    cached = sum(s.num_cached for s in sessions) / max(1, sum(s.num_cacheable for s in sessions))
    report.write(
        capacity_per_s=capacity,
        load=options.load,
        sessions=options.sessions,
        turns=options.turns,
        decode_workers=options.decode,
        moved_share=moved,
        cached_share=cached,
        sessions_on_one_worker=sum(not s.num_moves for s in sessions),
    )
    print(f"capacity {capacity:.2f} turns/s; {moved:.1%} of later turns moved (goal: 10%)")
    print(f"{cached:.2%} of the cacheable tokens were cached (goal: 99%)")
    return not (moved <= MOVED_MOST and cached >= CACHED_LEAST)


async def measure_capacity(url: str, options: Options) -> float:
    sessions = _sessions("warm", 2 * CLIENTS, options.seed)
    async with client_of(url) as client:

        async def talk(few: list[Session]) -> None:
            for session in few:
                for _ in range(options.turns):
                    await session.take_turn(client)

        await talk(sessions[:1])  # until the workers have measured their rates
        await asyncio.sleep(2.0)
        began = time.perf_counter()
        await asyncio.gather(*(talk([one]) for one in sessions[CLIENTS:]))
        return CLIENTS * options.turns / (time.perf_counter() - began)


async def converse(url: str, options: Options, rate: float) -> list[Session]:
    """All sessions take their turns, in total `rate` turns a second on average."""
    sessions = _sessions("session", options.sessions, options.seed)
    mean_pause_s = options.sessions / rate
    async with client_of(url) as client:

        async def talk(session: Session) -> None:
            await asyncio.sleep(session.rng.uniform(0.0, mean_pause_s))
            for _ in range(options.turns):
                began = time.perf_counter()
                await session.take_turn(client)
                pause_s = session.rng.uniform(0.0, 2 * mean_pause_s)
                await asyncio.sleep(max(0.0, pause_s - (time.perf_counter() - began)))

        await asyncio.gather(*map(talk, sessions))
    return sessions


def _sessions(kind: str, count: int, seed: int) -> list[Session]:
    names = [f"{kind} {number}" for number in range(count)]
    return [Session(name, Random(f"{seed} {name}")) for name in names]


if __name__ == "__main__":
    run_main(main)
