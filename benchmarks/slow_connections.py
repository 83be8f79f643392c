"""Tests whether clients that hold connections and ask nothing delay the others.

    python benchmarks/slow_connections.py [--number 10000] [--seconds 20] [--kinds silent,...]

A router with its default bounds, and a scripted worker that answers at once. 200 good clients at
127.0.0.1 and 127.0.0.3 ask 50 completions a second, each fifth on a new connection. For each kind
of slow client: the good ones alone, then beside 10,000 connections from 127.0.0.2, then alone
again. The slow clients are a process of their own and open what was closed again. Prints the
good ones' p50 and p99, the p99 relative to the mean of its quiet neighbours, and the
failures. Writes the rows of these kinds to benchmarks/results/slow_connections.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from tandem.cluster.launch.embedded_redis import EmbeddedRedis
from tandem.config.cluster import ClusterConfig
from tandem.models.source import resolve
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.store.client import connect
from tests.harness.cluster import free_port
from tests.harness.good_clients import GoodClients
from tests.harness.scripted_worker import Say, ScriptedWorker, saying
from tests.harness.slow_clients import KINDS, slow_clients

RESULTS = Path(__file__).parent / "results" / "slow_connections.json"
SETTLE_S = 2.0  # after the slow clients came, and after they went


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--number", type=int, default=10_000, help="slow connections")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--reopen", type=float, default=200.0, help="connections a second")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments))
    kinds = json.loads(arguments.json.read_text()) if arguments.json.is_file() else {}
    for row in rows:
        row |= {"number": arguments.number, "seconds": arguments.seconds}
        kinds[row.pop("kind")] = row | {"reopened_a_second": arguments.reopen}
    arguments.json.write_text(json.dumps(kinds, indent=1) + "\n")


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    async with started_router() as (http_port, grpc_port):
        await ask(http_port, 5.0)  # warm-up
        quiet = await ask(http_port, arguments.seconds)
        for name in arguments.kinds.split(","):
            port = grpc_port if KINDS[name].is_grpc else http_port
            attack = slow_clients(name, port, arguments.number, reopen=arguments.reopen)
            await asyncio.to_thread(attack.__enter__)
            await asyncio.sleep(SETTLE_S)
            beside = await ask(http_port, arguments.seconds)
            await asyncio.to_thread(attack.__exit__, None, None, None)
            await asyncio.sleep(SETTLE_S)
            before, quiet = quiet, await ask(http_port, arguments.seconds)
            row = {
                "kind": name,
                "p50_ms": beside.percentile_ms(0.5),
                "p99_ms": beside.percentile_ms(0.99),
                "quiet_p50_ms": (before.percentile_ms(0.5) + quiet.percentile_ms(0.5)) / 2,
                "quiet_p99_ms": (before.percentile_ms(0.99) + quiet.percentile_ms(0.99)) / 2,
                "requests": len(beside.times_s),
                "failures": len(beside.failures),
            }
            row["p99_ratio"] = row["p99_ms"] / row["quiet_p99_ms"]
            rows.append(row)
            print(
                f"{name:16} p50 {row['p50_ms']:6.2f} ms ({row['quiet_p50_ms']:6.2f} quiet), "
                f"p99 {row['p99_ms']:7.2f} ms ({row['quiet_p99_ms']:7.2f} quiet): "
                f"{row['p99_ratio']:.2f} times, {row['failures']} failures of {row['requests']}"
                + (f", such as {beside.failures[0]}" if beside.failures else ""),
                flush=True,
            )
    return rows


async def ask(port: int, seconds: float) -> GoodClients:
    clients = GoodClients(port)
    await clients.run(seconds)
    return clients


@asynccontextmanager
async def started_router(*options: str) -> AsyncIterator[tuple[int, int]]:
    """Starts a router as a process, on a scripted worker in this one; yields its ports."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        cluster = ClusterConfig(f"slow-{uuid.uuid4().hex[:8]}", server.url, "a-token")
        redis = connect(server.url)
        fingerprint = resolve("smollm2").fingerprint
        worker = await ScriptedWorker(redis, cluster, fingerprint=fingerprint).start()

        numbers = itertools.count(1)

        async def answer(submit: worker_pb2.SubmitSequence, say: Say) -> None:
            await saying([1000])(submit, say)
            worker.tell_load(next(numbers))
            worker.submitted.clear()

        worker.script = answer
        ports = free_port(), free_port()
        environment = {
            **os.environ,
            "TANDEM_CLUSTER_ID": cluster.cluster_id,
            "TANDEM_REDIS_URL": server.url,
            "TANDEM_CLUSTER_TOKEN": "a-token",
        }
        command = [sys.executable, "-m", "tandem.router", "--model", "smollm2"]
        command += ["--http-port", str(ports[0]), "--grpc-port", str(ports[1]), *options]
        with (Path(folder) / "router.log").open("wb") as log:
            router = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=log, stderr=log
            )
        try:
            await until_ready(ports[0])
            yield ports
        finally:
            router.terminate()
            await router.wait()
            await worker.stop()
            await redis.aclose()


async def until_ready(port: int) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(timeout=5) as http:
        while True:
            try:
                if (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
