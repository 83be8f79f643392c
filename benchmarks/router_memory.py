"""Measures what a router keeps of each request that it has served.

    python benchmarks/router_memory.py [--requests 20000] [--clients 16] [--out FILE]

A router process with a scripted worker that answers at once gets completions, as streams and whole,
of which one in ten is left by its client. After each 1,000 it is measured: the memory that the
process has of its own. Until the log of requests is full (`REQUESTS_MAX`) each request adds a
record to it; after that nothing may grow. The slopes of both parts, least squares, are told in MiB
for 1,000 requests; the first step, which loads what is needed once, is in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from process_growth import HOUR_S, own_memory_mib, slope_per_hour
from tandem.router.request.log import REQUESTS_MAX
from tests.harness.router_process import RouterProcess, started_router

_STEP = 1000
_PROMPT_TOKENS, _TOKENS = 64, 16
_LEAVER_EVERY = 10


async def _ask(http: httpx.AsyncClient, rng: Random, number: int) -> None:
    body = {
        "prompt": [rng.randrange(1000, 40_000) for _ in range(_PROMPT_TOKENS)],
        "max_tokens": _TOKENS,
        "stream": number % 2 == 0,
    }
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for _ in answer.aiter_lines():
            if number % _LEAVER_EVERY == 0:
                return


async def measure(router: RouterProcess, num_requests: int, num_clients: int) -> list[float]:
    """Returns the router's memory (MiB) before the first request and after each step."""
    rng, found = Random(0), [own_memory_mib(router.pid)]
    url = f"http://127.0.0.1:{router.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for first in range(0, num_requests, _STEP):
            numbers = iter(range(first, first + _STEP))

            async def client(numbers: Any = numbers) -> None:
                for number in numbers:
                    await _ask(http, rng, number)

            await asyncio.gather(*(client() for _ in range(num_clients)))
            found.append(own_memory_mib(router.pid))
            print(f"{first + _STEP} requests: {found[-1]:.2f} MiB", flush=True)
    return found


def slope(values: list[float]) -> dict[str, float]:
    """Returns MiB for 1,000 requests and the standard error."""
    found, error = (
        x / HOUR_S for x in slope_per_hour(list(map(float, range(len(values)))), values)
    )
    return {"mib_per_1000": round(found, 3), "error": round(error, 3)}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with started_router(Path(folder)) as router:
            memory = await measure(router, arguments.requests, arguments.clients)
    full = REQUESTS_MAX // _STEP + 1
    return {
        "memory_mib": [round(mib, 2) for mib in memory],
        "until_the_log_is_full": slope(memory[1:full]),
        "after_that": slope(memory[full:]),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments))
    print(json.dumps({name: told for name, told in found.items() if name != "memory_mib"}))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
