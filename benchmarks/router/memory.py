"""Measures what a router keeps of each request that it has served.

    python -m benchmarks.router.memory [--requests 20000] [--clients 16] [--output FILE]

The router of a `tandem up` whose worker has a tiny random model serves completions, half of them as
streams. The clients leave one in ten. After each 1,000 requests, the program measures the memory
that the router's process has of its own. Until the log of requests is full (`REQUESTS_MAX`), each
request adds a record to it. After that nothing may grow. The slopes of both parts, by least
squares, are in MiB for 1,000 requests. The first 1,000 requests, which load what is needed once,
are in neither.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.shared.cluster import Cluster, up
from benchmarks.shared.random_models import make_tiny_model
from benchmarks.shared.requests import random_prompt
from benchmarks.soak.process_growth import HOUR_S, name_of, own_memory_mib, slope_per_hour
from tandem.router.request.log import REQUESTS_MAX
from tandem_bench.framework import Report, options, run_main

_STEP = 1000
_PROMPT_TOKENS, _TOKENS = 64, 16
_LEAVER_EVERY = 10


async def _ask(http: httpx.AsyncClient, rng: Random, number: int) -> None:
    body = {
        "prompt": random_prompt(rng, _PROMPT_TOKENS),
        "max_tokens": _TOKENS,
        "stream": number % 2 == 0,
    }
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for _ in answer.aiter_lines():
            if number % _LEAVER_EVERY == 0:
                return


async def measure(cluster: Cluster, num_requests: int, num_clients: int) -> list[float]:
    """Returns the router's memory (MiB) before the first request and after each step."""
    pid = next(p.pid for p in cluster.processes() if name_of(p) == "router-0")
    rng, found = Random(0), [own_memory_mib(pid)]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        for first in range(0, num_requests, _STEP):
            numbers = iter(range(first, first + _STEP))

            async def client(numbers: Any = numbers) -> None:
                for number in numbers:
                    await _ask(http, rng, number)

            await asyncio.gather(*(client() for _ in range(num_clients)))
            found.append(own_memory_mib(pid))
            print(f"{first + _STEP} requests: {found[-1]:.2f} MiB", flush=True)
    return found


def slope(values: list[float]) -> dict[str, float]:
    """Returns MiB for 1,000 requests and the standard error."""
    found, error = (
        x / HOUR_S for x in slope_per_hour(list(map(float, range(len(values)))), values)
    )
    return {"mib_per_1000": round(found, 3), "error": round(error, 3)}


@options
class Options:
    requests: int = 20_000
    clients: int = 16
    output: Path | None = None


def main(options: Options = Options()) -> None:
    report, full = Report(options.output), REQUESTS_MAX // _STEP + 1
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name)).path
        pools = ("--prefill", "0", "--decode", "1", "--no-grpc")
        with up(*pools, "--model", str(model), "--num-blocks", "2000") as cluster:
            memory = asyncio.run(measure(cluster, options.requests, options.clients))
    slopes = {
        "until_the_log_is_full": slope(memory[1:full]),
        "after_that": slope(memory[full:]),
    }
    report.write(memory_mib=[round(mib, 2) for mib in memory], **slopes)
    print(json.dumps(slopes))


if __name__ == "__main__":
    run_main(main)
