"""A prefill and a decode worker on one GPU, with --transport auto: tokens as those of transformers.

The workers, a router and Redis are processes without Ray. The model is a small Llama with random
weights in fp32, and transformers computes the reference on the CPU. The decode worker pulls every
prompt; on a GPU, `auto` must have chosen CUDA IPC.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu_day.parts import add_row
from benchmarks.shared.cluster import free_port, wait_for
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import REDIS_URL_VARIABLE

_VOCABULARY = 203
_NUM_TOKENS = 24
_PROMPTS = (3, 40, 97, 130, 180, 255, 400, 480)  # lengths in tokens
_READY_S = 90.0
_WORKER = (
    *("--transport", "auto", "--prefill-at", "remote", "--local-prefill-max-tokens", "0"),
    *("--dtype", "float32", "--kv-dtype", "float32", "--num-blocks", "400"),
    *("--max-num-seqs", "8", "--max-model-len", "512"),
)
_ON_GPU = ("--device", "cuda", "--kernels", "triton", "--numerics", "fast")
_ON_CPU = ("--device", "cpu", "--numerics", "invariant")


def run(*, stand_in: bool) -> None:
    lengths = _PROMPTS[:4] if stand_in else _PROMPTS
    prompts = [[random.Random(n).randrange(95) for _ in range(n)] for n in lengths]
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-day-") as name:
        folder = Path(name)
        reference = make_model(folder / "model", num_layers=2 if stand_in else 8)
        wanted = [generate(reference, prompt) for prompt in prompts]
        options = (*_WORKER, *(_ON_CPU if stand_in else _ON_GPU))
        with cluster(folder, options) as router:
            made = [complete(router, prompt) for prompt in prompts]
            (decode,) = (w for w in router.workers() if w["worker_id"] == "decode-0")
            pulled = router.pulled(decode)
    transport = decode["transports"]["prefill-0"]
    same = [one == other for one, other in zip(made, wanted, strict=True)]
    add_row(
        f"answers of 1P1D with auto equal to transformers', {len(prompts)} prompts, fp32",
        ratio=sum(same) / len(same),
        goal=1.0,
        transport=transport,
        blocks_pulled=pulled,
    )
    add_row(
        f"blocks pulled over {transport}, chosen by auto",
        ratio=float(pulled > 0 and (stand_in or transport == "cuda_ipc")),
        goal=1.0,
        pair=decode["pairs"]["prefill-0"] if "pairs" in decode else None,
    )


def make_model(path: Path, *, num_layers: int) -> LlamaForCausalLM:
    """Writes a random model in fp32, and returns it."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    disable_progress_bar()
    model = LlamaForCausalLM(config)
    model.eval()
    model.save_pretrained(path)
    vocabulary = {chr(32 + i): i for i in range(95)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    return model


def generate(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    """Returns the greedy tokens after a prompt."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            min_new_tokens=_NUM_TOKENS,
            max_new_tokens=_NUM_TOKENS,
        )
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer


class Router:
    """A running router, as its clients and operators reach it."""

    def __init__(self) -> None:
        self.port, self.admin_port = free_port(), free_port()

    def workers(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"http://127.0.0.1:{self.admin_port}/v1/cluster", timeout=5)
        return list(answer.raise_for_status().json()["workers"])

    def pulled(self, worker: dict[str, Any]) -> float:
        """Returns the number of blocks that a worker has pulled."""
        text = httpx.get(f"http://{worker['metrics_address']}/metrics", timeout=5).text
        lines = (x for x in text.splitlines() if x.startswith("tandem_kv_blocks_pulled_total{"))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def complete(router: Router, prompt: list[int]) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    url = f"http://127.0.0.1:{router.port}/v1/completions"
    answer = httpx.post(url, json=body, timeout=60).raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@contextmanager
def cluster(folder: Path, options: tuple[str, ...]) -> Iterator[Router]:
    """Starts Redis, a router and two workers, and stops them at the end."""
    cluster_id = f"gpu-day-{uuid.uuid4().hex[:8]}"
    token, router = uuid.uuid4().hex, Router()
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, kind: Any, *command: str) -> None:
        environment = {
            **os.environ,
            REDIS_URL_VARIABLE: redis.url_of(kind),
            "TANDEM_CLUSTER_ID": cluster_id,
            "TANDEM_CLUSTER_TOKEN": token,
            "OMP_NUM_THREADS": "1",
        }
        log = (folder / f"{name}.log").open("wb")
        with log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command, "--model", str(folder / "model")],
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )

    def is_ready() -> bool:
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("a process of the cluster has ended")
        try:
            workers = {worker["worker_id"]: worker for worker in router.workers()}
        except httpx.HTTPError:
            return False
        ready = [name for name, worker in workers.items() if worker["state"] == "ready"]
        return len(ready) == 2 and "prefill-0" in workers["decode-0"]["transports"]

    with EmbeddedRedis(cluster_id=cluster_id) as redis:
        try:
            ports = ("--http-port", str(router.port), "--grpc-port", str(free_port()))
            admin = ("--admin-port", str(router.admin_port), "--admin-grpc-port", "0")
            start("router", "router", "tandem.router", *ports, *admin)
            for role in ("prefill", "decode"):
                identity = ("--role", role, "--worker-id", f"{role}-0")
                start(role, "worker", "tandem.worker", *identity, *options)
            began = time.monotonic()
            wait_for(is_ready, deadline_s=_READY_S, what="two ready workers", interval_s=0.2)
            print(f"the cluster is ready after {time.monotonic() - began:.1f} s", flush=True)
            yield router
        except BaseException:
            for log in sorted(folder.glob("*.log")):
                print(f"{log.name}:\n{log.read_text()[-2000:]}", flush=True)
            raise
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
