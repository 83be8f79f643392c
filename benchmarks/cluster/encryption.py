"""Time to first token with a key and its limits, TLS and mutual TLS, beside none of it, in turn.

    python -m benchmarks.cluster.encryption [--turns 9] [--requests 12] [--split]

Two clusters of one prefill and one decode worker stand side by side. One has TLS on the public port
and mutual TLS inside, and its client a key with limits that it never meets; the other has nothing.
With `--split` three more have one of these each. Blocks go by gRPC in all. `local`: a short prompt,
which the decode worker prefills; `pulled`: 512 tokens, which the prefill worker computes. Each
request has its own prompt; connections are kept.
Prints the medians of all requests, the difference and the ratio. `tandem bench transfer` compares
the transfer of blocks alone (`grpc_tls`).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx

from benchmarks.shared.cluster import up
from benchmarks.shared.requests import Ask, client_of, random_prompt, send
from tandem_bench.framework import Report, options, run_main

OPTIONS = ("--num-blocks", "2000", "--transport", "grpc", "--prefill-at", "remote")
PROMPTS = {"local": 48, "pulled": 512}  # tokens
LIMITS = ("--requests-per-minute", "100000", "--tokens-per-minute", "100000000")


@options
class Options:
    turns: int = 9
    requests: int = 12
    """Requests of each turn and kind."""
    split: bool = False
    """Also run one cluster for each cause."""
    output: Path | None = None


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    # Each kind of cluster: a key, TLS at the public port, mutual TLS inside.
    kinds = {"off": (False, False, False), "on": (True, True, True)}
    if options.split:
        kinds |= {"key": (True, False, False), "tls": (False, True, False)}
        kinds |= {"mtls": (False, False, True)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificate, key = make_certificate(folder)
        clients = {}
        for kind, (has_key, has_tls, has_mutual_tls) in kinds.items():
            chosen = () if has_mutual_tls else ("--no-cluster-tls",)
            chosen += ("--tls-cert", str(certificate), "--tls-key", str(key)) if has_tls else ()
            scheme = "https" if has_tls else "http"
            cluster = stack.enter_context(up(*OPTIONS, *chosen, scheme=scheme))
            headers = {}
            if has_key:
                made = cluster.tandem("keys", "create", "--tenant", "bench", *LIMITS)
                headers = {"Authorization": f"Bearer {made}"}
            verify = str(certificate) if has_tls else True
            clients[kind] = client_of(cluster.url, headers=headers, verify=verify)
        found = asyncio.run(measure(clients, options.turns, options.requests))
    medians = {
        prompt: {kind: 1000 * statistics.median(taken) for kind, taken in times.items()}
        for prompt, times in found.items()
    }
    report.write(medians_ms=medians)
    for prompt, times in medians.items():
        off = times.pop("off")
        print(f"{prompt}: off {off:.2f} ms")
        for kind, on in times.items():
            print(f"{prompt}: {kind} {on:.2f} ms, {on - off:+.2f} ms, {on / off:.3f} times")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Makes a certificate of this machine's own and its key, for the public ports."""
    chain, key = folder / "public.crt", folder / "public.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(chain), "-subj", "/CN=bench"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return chain, key


async def measure(
    clients: dict[str, httpx.AsyncClient], turns: int, requests: int
) -> dict[str, dict[str, list[float]]]:
    """Returns the TTFT of each request in seconds, by kind of prompt and cluster. The first turn
    warms up."""
    rng = random.Random(1)
    found: dict[str, dict[str, list[float]]] = {k: {n: [] for n in clients} for k in PROMPTS}
    async with AsyncExitStack() as stack:
        for client in clients.values():
            await stack.enter_async_context(client)
        for turn in range(-1, turns):
            for kind, num_tokens in PROMPTS.items():
                for _ in range(requests):
                    for name in sorted(clients, reverse=bool(turn % 2)):
                        ask = Ask(random_prompt(rng, num_tokens), 4)
                        seen = await send(clients[name], ask)
                        if turn >= 0:
                            found[kind][name].append(seen.ttft_s)
    return found


if __name__ == "__main__":
    run_main(main)
