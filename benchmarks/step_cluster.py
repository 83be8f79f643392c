"""A cluster of sleeping engines (`sleeping_engine.py`), its load and its size, for autoscaler_step.

`tandem up` with Ray, Redis and a router runs as it does for everybody; only its workers' engines
sleep instead of computing.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat_load import Chat, Seen, ask
from benchmarks.sleeping_engine import AUTOSCALE, GPU, GPUS, LOAD_S
from tandem.common.config.autoscale import AutoscaleConfig
from tests.harness.cluster import free_port, wait_for

ROOT = Path(__file__).parents[1]
SIZES_EVERY_S = 0.25
START_DEADLINE_S = 180.0
SMALLEST_DEADLINE_S = 900.0
CONTEXT_MAX = 4096


@dataclass
class StepCluster:
    """`tandem up` as its clients and operators reach it."""

    url: str
    admin_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def state(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.admin_url}/v1/cluster", timeout=10).json()
        return answer

    def sizes(self) -> dict[str, int]:
        """Returns the processes of each pool, which are paid for from start to end."""
        return sizes_of(self.state())

    def tandem(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tandem.ops.cli", *arguments, "--url", self.admin_url]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def split(self, prefill: int, decode: int) -> None:
        """Gives the pools these sizes, and waits until all workers are ready."""
        self.tandem("scale", f"prefill={prefill}", f"decode={decode}", "--deadline", "180")
        self.wait_ready(prefill, decode)

    def wait_ready(self, prefill: int, decode: int) -> None:
        def ready() -> bool:
            workers = self.state()["workers"]
            return all(
                sum(w["role"] == role and w["state"] == "ready" for w in workers) == count
                for role, count in (("prefill", prefill), ("decode", decode))
            )

        what = f"{prefill} + {decode} workers"
        wait_for(ready, deadline_s=START_DEADLINE_S, what=what, interval_s=0.2)


def sizes_of(state: dict[str, Any]) -> dict[str, int]:
    pools = state["pools"]
    return {role: len(pools.get(role, {}).get("agents", ())) for role in ("prefill", "decode")}


@dataclass
class SizeWatch:
    """Notes the size of the pools while it is entered."""

    cluster: StepCluster
    worker_s: float = 0.0
    changes: list[tuple[float, int, int]] = field(default_factory=list)  # s, prefill, decode
    began: float = field(default_factory=time.perf_counter)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> SizeWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    async def until(self, size: tuple[int, int]) -> float:
        """Returns when the pools had this size, drained workers gone."""
        async with asyncio.timeout(SMALLEST_DEADLINE_S):
            while not self.changes or self.changes[-1][1:] != size:
                self._changed.clear()
                await self._changed.wait()
        return self.changes[-1][0]

    async def _watch(self) -> None:
        async with httpx.AsyncClient(timeout=10) as client:
            last_s = self.seconds()
            while True:
                reply = await client.get(f"{self.cluster.admin_url}/v1/cluster")
                sizes, now_s = sizes_of(reply.json()), self.seconds()
                self.worker_s += (now_s - last_s) * sum(sizes.values())
                last_s = now_s
                if not self.changes or self.changes[-1][1:] != tuple(sizes.values()):
                    self.changes.append((round(now_s, 1), sizes["prefill"], sizes["decode"]))
                    self._changed.set()
                await asyncio.sleep(SIZES_EVERY_S)


@contextmanager
def running(
    gpu: str,
    *,
    prefill: int,
    decode: int,
    ttft_limit_s: float,
    load_s: float = 0.0,
    autoscale: AutoscaleConfig | None = None,
) -> Iterator[StepCluster]:
    """Runs a cluster; its log stays if it fails."""
    ports = [free_port() for _ in range(4)]
    names = ("--port", "--grpc-port", "--admin-port", "--admin-grpc-port")
    with tempfile.TemporaryDirectory() as folder:
        model = _make_model(Path(folder) / "model")
        options = [str(text) for pair in zip(names, ports, strict=True) for text in pair]
        options += ["--model", str(model), "--prefill", str(prefill), "--decode", str(decode)]
        card = GPUS[gpu]
        options += ["--num-blocks", str(card.kv_tokens // 16), "--dtype", "bfloat16"]
        options += ["--ttft-limit", str(ttft_limit_s)]
        environment = {**os.environ, GPU: gpu, LOAD_S: str(load_s)}
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'services'}:{ROOT / 'kernels'}"
        if autoscale is not None:
            environment[AUTOSCALE] = json.dumps(asdict(autoscale))
        log = Path(folder) / "up.log"
        command = [sys.executable, "-m", "benchmarks.sleeping_engine", "up", *options]
        command += ["--die-with-parent", str(os.getpid())]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, cwd=ROOT
            )
        urls = (f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[2]}")
        cluster = StepCluster(*urls, process, log)

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return "Ctrl-C stops" in log.read_text()

        try:
            wait_for(is_up, deadline_s=START_DEADLINE_S, what="the cluster", interval_s=0.2)
            yield cluster
        except BaseException:
            print(log.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)


async def replay(cluster: StepCluster, chats: Sequence[Chat], began: float) -> list[Seen]:
    """Sends each chat at its time, whether the cluster keeps up or not."""
    limits = httpx.Limits(max_connections=2048, max_keepalive_connections=2048)

    async def one(client: httpx.AsyncClient, chat: Chat) -> Seen:
        await asyncio.sleep(max(0.0, chat.at_s - (time.perf_counter() - began)))
        return await ask(client, chat, began=began)

    async with httpx.AsyncClient(base_url=cluster.url, timeout=180, limits=limits) as client:
        return list(await asyncio.gather(*(one(client, chat) for chat in chats)))


async def first_token_from_zero(cluster: StepCluster, chat: Chat) -> dict[str, float]:
    """Sends a chat to empty pools. Returns its TTFT, and the start of the decode worker: from its
    process to its record as ready."""
    asking = asyncio.create_task(replay(cluster, [chat], time.perf_counter()))
    sent_at = time.time()
    spawned_at = ready_at = 0.0
    async with httpx.AsyncClient(timeout=10) as client:
        while not ready_at and not asking.done():
            state = (await client.get(f"{cluster.admin_url}/v1/cluster")).json()
            agents = state["pools"].get("decode", {}).get("agents", ())
            running = [a["since"] for a in agents if a["state"] == "running"]
            spawned_at = spawned_at or min(running, default=0.0)
            workers = [w for w in state["workers"] if w["role"] == "decode"]
            if any(w["state"] == "ready" for w in workers):
                ready_at = time.time()
            await asyncio.sleep(0.02)
    (seen,) = await asking
    assert seen.status == 200, seen
    assert not seen.error, seen
    start_s = (ready_at or time.time()) - spawned_at
    return {
        "ttft_s": seen.ttft_s,
        "until_process_s": spawned_at - sent_at,
        "start_s": start_s,
        "more_s": seen.ttft_s - start_s,
    }


def _make_model(path: Path) -> Path:
    """Makes a tiny random model with the built-in model's tokenizer: its KV is what travels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tandem.models.source import resolve

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_MAX,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for file in resolve("smollm2").path.iterdir():
        if not (path / file.name).exists() and file.suffix != ".safetensors":
            (path / file.name).symlink_to(file)
    return path
