"""A trace of agents, by its seed: prompts as blocks of 16 bytes, in the order in which they come.

    python -m benchmarks.simulator.agents_trace agents.jsonl [--requests 400] [--seed 0]

As a program it writes the trace in Mooncake's form, for `tandem simulate --block-size 16`.

Agents of a few kinds share their kind's system prompt. A session asks again and again, with its
whole conversation and a tool's result at the end, and pauses while the tool runs. Between them come
prompts that nobody repeats. The working set is the most blocks that open sessions have at once.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tandem_bench.framework import options, run_main

BLOCK = 16  # tokens
KINDS, SYSTEM = 5, (60, 200)  # kinds of agents, and blocks of a system prompt
TURNS, GROWTH = (4, 20), (4, 40)  # of a session, and blocks that a turn adds
ONCE, ONCE_SHARE = (30, 200), 0.35  # blocks of a prompt that nobody repeats, and their share
OPEN = 40  # sessions at once


@dataclass(frozen=True)
class Request:
    at: float  # seconds
    blocks: list[bytes]  # each has the tokens of its block, and no other block is the same
    in_session: bool
    calls_tool: bool  # its answer does, and its session comes back


@dataclass(order=True)
class Session:
    at: float  # of its next request
    blocks: list[bytes] = field(compare=False)
    turns_left: int = field(compare=False)


class Trace:
    """Requests in their order; `working_set` is known when all were made."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._systems = [self._fresh(SYSTEM) for _ in range(KINDS)]
        self.working_set = 0

    def requests(self, count: int) -> Iterator[Request]:
        sessions = [self._open(self._rng.random() * 60) for _ in range(OPEN)]
        heapq.heapify(sessions)
        at = 0.0
        for _ in range(count):
            if self._rng.random() < ONCE_SHARE:
                yield Request(at, self._fresh(ONCE), in_session=False, calls_tool=False)
                continue
            session = heapq.heappop(sessions)
            at = session.at
            session.blocks += self._fresh(GROWTH)
            session.turns_left -= 1
            goes_on = session.turns_left > 0
            yield Request(at, list(session.blocks), in_session=True, calls_tool=goes_on)
            self.working_set = max(
                self.working_set, len({b for each in (session, *sessions) for b in each.blocks})
            )
            session.at += self._rng.lognormvariate(2.0, 1.2)  # a tool: 7 s in the middle
            heapq.heappush(sessions, session if goes_on else self._open(session.at))

    def _open(self, at: float) -> Session:
        return Session(at, list(self._rng.choice(self._systems)), self._rng.randint(*TURNS))

    def _fresh(self, sizes: tuple[int, int]) -> list[bytes]:
        return [self._rng.randbytes(16) for _ in range(self._rng.randint(*sizes))]


def mooncake_rows(requests: list[Request]) -> Iterator[dict[str, object]]:
    """Yields requests in Mooncake's form, each answered with one token."""
    ids: dict[bytes, int] = {}
    for request in requests:
        yield {
            "timestamp": round(1000 * request.at),
            "input_length": BLOCK * len(request.blocks),
            "output_length": 1,
            "hash_ids": [ids.setdefault(block, len(ids)) for block in request.blocks],
            "session_id": "agent" if request.in_session else "",
        }


@options
class Options:
    requests: int = 400
    seed: int = 0


def main(file: Path, /, args: Options = Options()) -> None:
    trace = Trace(args.seed)
    requests = list(trace.requests(args.requests))
    file.write_text("".join(json.dumps(row) + "\n" for row in mooncake_rows(requests)))
    print(f"written: {file}; the working set has {trace.working_set} blocks of {BLOCK} tokens")


if __name__ == "__main__":
    run_main(main)
