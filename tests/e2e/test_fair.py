"""A tenant within its share is served beside one that sends five times the capacity."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from random import Random

import httpx
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.e2e.test_many import VOCABULARY
from tests.harness.client import DEADLINE_S
from tests.harness.cluster import LocalCluster
from tests.harness.slow_engine import HELD_STEP_S, HOLD_VARIABLE
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLOTS = 4  # running slots of the decode worker
TOKENS = 8  # of an answer
CAPACITY = SLOTS / (HELD_STEP_S * TOKENS)  # requests a second; a step takes 0.2 s on any machine
LIMIT_S = 6.0
SPAN_S = 40.0
LOADS = {"flood": 5.0, "steady": 0.45}


async def ask(client: httpx.AsyncClient, tenant: str, prompt: list[int], at_s: float) -> int:
    await asyncio.sleep(at_s)
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
    headers = {"x-tandem-tenant": tenant}
    return (await client.post("/v1/completions", json=body, headers=headers)).status_code


async def test_a_flood_takes_nothing_from_a_tenant_within_its_share(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    make_tiny_model("llama", model, vocab_size=VOCABULARY)
    hold = tmp_path / "hold"
    hold.touch()
    cluster = LocalCluster(redis_server, tmp_path, model=str(model))
    cluster.options = ["--transport", "grpc", "--max-num-seqs", str(SLOTS), "--num-blocks", "400"]
    options = ("--trust-tenant-header", "--ttft-limit", str(LIMIT_S))
    cluster.router_options = [*cluster.router_options, *options]
    try:
        cluster.start_router()
        for role in ("prefill", "decode"):
            cluster.start_worker(
                f"{role}-0",
                role,
                module=("tests.harness.slow_engine", "worker"),
                environment={HOLD_VARIABLE: str(hold)},
            )
        cluster.wait_ready()
        rng = Random(0)
        sent: list[tuple[str, float]] = []
        for tenant, load in LOADS.items():
            at_s = rng.expovariate(load * CAPACITY)
            while at_s < SPAN_S:
                sent.append((tenant, at_s))
                at_s += rng.expovariate(load * CAPACITY)
        limits = httpx.Limits(max_connections=1024)
        async with httpx.AsyncClient(
            base_url=cluster.url, timeout=DEADLINE_S, limits=limits
        ) as client:
            for _ in range(4):  # until the workers have measured their rates
                await ask(client, "warm", [rng.randrange(VOCABULARY) for _ in range(40)], 0.0)
            began = time.monotonic()
            statuses = await asyncio.gather(
                *(
                    ask(client, tenant, [rng.randrange(VOCABULARY) for _ in range(40)], at_s)
                    for tenant, at_s in sent
                )
            )
            assert time.monotonic() - began < SPAN_S + LIMIT_S + 30
        counts = Counter((tenant, code) for (tenant, _), code in zip(sent, statuses, strict=True))
        assert {code for _, code in counts} == {200, 429}, counts
        steady = sum(tenant == "steady" for tenant, _ in sent)
        assert counts["steady", 200] >= 0.95 * steady, counts
        served = counts["steady", 200] + counts["flood", 200]
        assert served >= 0.7 * CAPACITY * SPAN_S, counts
        cluster.wait_idle()
    finally:
        cluster.close()
