"""Time to first token with a key and its limits, TLS and mutual TLS, beside none of it, in turn.

    python benchmarks/encryption.py [--turns 9] [--requests 12] [--split]

Two clusters of one prefill and one decode worker stand side by side. One has TLS on the public port
and mutual TLS inside, and its client a key with limits that it never meets; the other has nothing.
With `--split` three more have one of these each. Blocks go by gRPC in all. `local`: a short prompt,
which the decode worker prefills; `pulled`: 512 tokens, which the prefill worker computes. Each
request has its own prompt; connections are kept.
Prints the medians of all requests, the difference and the ratio. `tandem bench transfer` compares
the transfer of blocks alone (`grpc_tls`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.peers.servers import close_on_sigterm
from tandem.cluster.launch.certificates import Authority
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.net.security import keys
from tandem.net.security.limits import Limits
from tests.harness.cluster import LocalCluster

OPTIONS = ("--num-blocks", "2000", "--transport", "grpc", "--prefill-at", "remote")
PROMPTS = {"local": 48, "pulled": 512}  # tokens


class MeasuredCluster(LocalCluster):
    """A cluster that may speak TLS on its router's public ports, and may want a key."""

    key = ""
    scheme = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.http_port}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--requests", type=int, default=12, help="of each turn and kind")
    parser.add_argument("--split", action="store_true", help="one cluster for each cause, too")
    args = parser.parse_args()
    close_on_sigterm()
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis() as redis:
        kinds: dict[str, tuple[Callable[[MeasuredCluster], None], ...]]
        kinds = {"off": (), "on": (add_key, add_tls, add_mutual_tls)}
        if args.split:
            kinds |= {"key": (add_key,), "tls": (add_tls,), "mtls": (add_mutual_tls,)}
        clusters = {kind: make(redis, Path(name) / kind, adds) for kind, adds in kinds.items()}
        try:
            for cluster in clusters.values():
                cluster.start(prefill=1, decode=1)
            found = asyncio.run(measure(clusters, args.turns, args.requests))
        finally:
            for cluster in clusters.values():
                cluster.close()
    for prompt, times in found.items():
        medians = {kind: 1000 * statistics.median(seconds) for kind, seconds in times.items()}
        off = medians.pop("off")
        print(f"{prompt}: off {off:.2f} ms")
        for kind, on in medians.items():
            print(f"{prompt}: {kind} {on:.2f} ms, {on - off:+.2f} ms, {on / off:.3f} times")


def make(
    redis: EmbeddedRedis, folder: Path, adds: Iterable[Callable[[MeasuredCluster], None]]
) -> MeasuredCluster:
    """Makes a cluster with a folder of its own; nothing is started."""
    folder.mkdir()
    cluster = MeasuredCluster(redis, folder, cluster_id=f"bench-{uuid.uuid4().hex[:8]}")
    cluster.options = OPTIONS
    for add in adds:
        add(cluster)
    return cluster


def add_mutual_tls(cluster: MeasuredCluster) -> None:
    """Gives the cluster's processes certificates for each other."""
    cluster.tls_dir = cluster.folder / "tls"
    authority = Authority(cluster.cluster_id)
    authority.write(cluster.tls_dir / "router", "router")
    authority.write(cluster.tls_dir / "worker", "worker")


def add_tls(cluster: MeasuredCluster) -> None:
    """Gives the router a certificate for its public ports."""
    chain, key = cluster.folder / "public.crt", cluster.folder / "public.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(chain), "-subj", "/CN=bench"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    cluster.scheme = "https"
    public = ("--tls-cert", str(chain), "--tls-key", str(key))
    cluster.router_options = (*cluster.router_options, *public)


def add_key(cluster: MeasuredCluster) -> None:
    """Makes a key with limits that its client never meets."""
    limits = Limits(requests_per_minute=100_000, tokens_per_minute=10**8, max_concurrent=100)
    made = keys.create("bench", "user", now=time.time(), limits=limits)
    file = cluster.folder / "keys"
    file.write_bytes(msgspec.json.encode([made.record]))
    cluster.key = made.text
    cluster.router_options = (*cluster.router_options, "--keys-file", str(file))


async def measure(
    clusters: dict[str, MeasuredCluster], turns: int, requests: int
) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of each request, by kind of prompt and cluster. The first turn warms."""
    rng = random.Random(1)
    found: dict[str, dict[str, list[float]]] = {k: {n: [] for n in clusters} for k in PROMPTS}
    clients = {
        name: httpx.AsyncClient(
            base_url=cluster.url,
            timeout=60,
            headers={"Authorization": f"Bearer {cluster.key}"} if cluster.key else None,
            verify=str(cluster.folder / "public.crt") if cluster.scheme == "https" else True,
        )
        for name, cluster in clusters.items()
    }
    for turn in range(-1, turns):
        for kind, num_tokens in PROMPTS.items():
            for _ in range(requests):
                for name in sorted(clients, reverse=bool(turn % 2)):
                    prompt = [rng.randrange(1000, 20_000) for _ in range(num_tokens)]
                    took_s = await first_token(clients[name], prompt)
                    if turn >= 0:
                        found[kind][name].append(took_s)
    for client in clients.values():
        await client.aclose()
    return found


async def first_token(client: httpx.AsyncClient, prompt: list[int]) -> float:
    """Returns the seconds from the request until the first event of its answer."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    started = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()
        await anext(lines)
        took_s = time.perf_counter() - started
        async for _ in lines:
            pass
    return took_s


if __name__ == "__main__":
    main()
