"""With `--prefill-at auto`, a prefill worker decodes requests while the decode worker is full."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.e2e.test_many import VOCABULARY
from tests.harness.client import DEADLINE_S, metric_at
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.slow_engine import HOLD_VARIABLE
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

SLOTS = 2  # running slots of each worker
TOKENS = 16
NUM_REQUESTS = 4


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> tuple[list[int], str]:
    """Returns the answer's tokens, and the id of the worker that decoded them first."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = await client.post(
        "/v1/completions",
        json=body | {"return_token_ids": True},
        headers={"x-tandem-placement": "1"},
    )
    assert answer.status_code == 200, answer.text
    placement = dict(
        word.partition("=")[::2]
        for word in answer.headers["x-tandem-placement"].split()
        if "=" in word
    )
    return answer.json()["choices"][0]["token_ids"], placement["decode"]


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_full_decode_worker_leaves_requests_where_they_are_prefilled(
    is_killed: bool, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """The tokens are those of a decode worker, also if the prefill worker is killed meanwhile."""
    model = tmp_path / "model"
    make_tiny_model("llama", model, vocab_size=VOCABULARY)
    hold = tmp_path / "hold"
    cluster = LocalCluster(redis_server, tmp_path, model=str(model))
    cluster.options = ["--numerics", "invariant", "--transport", "grpc", "--num-blocks", "400"]
    cluster.options += ["--max-num-seqs", str(SLOTS)]
    cluster.router_options = [*cluster.router_options, "--ttft-limit", "600"]
    rng = Random(0)
    # Each is new, because a request never leaves a worker that has its prompt for this.
    warm_up, prompts = (
        [[rng.randrange(VOCABULARY) for _ in range(100)] for _ in range(NUM_REQUESTS)]
        for _ in range(2)
    )
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
        async with httpx.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S) as client:

            def router_sees(worker_id: str) -> float:
                name = "tandem_worker_num_requests_running"
                return metric_at(cluster.admin_url, name, worker=worker_id)

            async def ask_all() -> list[asyncio.Task[tuple[list[int], str]]]:
                asking = []
                for number, prompt in enumerate(prompts):
                    if number == SLOTS:
                        await asyncio.to_thread(
                            wait_for,
                            lambda: router_sees("decode-0") == SLOTS,
                            deadline_s=DEADLINE_S,
                            what="a decode worker that the router knows to be full",
                        )
                    asking.append(asyncio.create_task(ask(client, prompt)))
                    await asyncio.sleep(0.1)
                return asking

            alone = [await ask(client, prompt) for prompt in warm_up]
            assert {worker_id for _, worker_id in alone} == {"decode-0"}
            hold.touch()
            asking = await ask_all()
            if is_killed:
                prefill = cluster.workers.pop("prefill-0")
                await asyncio.to_thread(
                    wait_for,
                    lambda: prefill.state().load.num_running,
                    deadline_s=DEADLINE_S,
                    what="a sequence on the prefill worker",
                )
                prefill.kill()
            together = await asyncio.gather(*asking)
            if not is_killed:  # otherwise an answer names the worker to which it moved
                assert {worker_id for _, worker_id in together} == {"prefill-0", "decode-0"}
            hold.unlink()
            expected = [await ask(client, prompt) for prompt in prompts]
            assert [tokens for tokens, _ in together] == [tokens for tokens, _ in expected]
        cluster.wait_idle()
    finally:
        cluster.close()
