"""Processes killed and clients gone, at the worst moments: every stream ends as it should."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import StartCluster
from tests.harness.client import complete_all, golden, open_client, stream_completion, tokens_of
from tests.harness.cluster import LocalCluster, wait_for

PROMPT = golden(6)[0][0]  # 487 tokens
SHORT_STEPS = ("--max-tokens-per-step", "64")
FREED_DEADLINE_S = 10.0  # the current step, on a machine that may stand still for seconds


async def collect(
    client: httpx.AsyncClient, prompt: list[int], started: asyncio.Event, **fields: Any
) -> list[dict[str, Any]]:
    events = []
    async for event in stream_completion(client, prompt, **fields):
        events.append(event)
        started.set()
    return events


def held(cluster: LocalCluster) -> dict[str, tuple[int, ...]]:
    """Returns each worker's counts of sequences, leases, pulls and used blocks, without quarantined
    ones."""
    found = {}
    for worker in cluster.workers.values():
        state = worker.state()
        assert state.integrity_ok, state.integrity_message
        load = state.load
        found[worker.worker_id] = (
            load.num_running + load.num_waiting,
            load.num_leases,
            load.num_pulls,
            load.blocks_used,
        )
    return found


@pytest.mark.slow  # in CI tests/chaos kills them, too
async def test_prefill_worker_killed_under_sixteen_streams(start_cluster: StartCluster) -> None:
    prompts, expected = golden(0, 4, 5, 6)
    with start_cluster("--local-prefill-max-tokens", "0") as cluster:
        started = asyncio.Event()
        async with open_client(cluster) as client:
            streams = [
                asyncio.create_task(collect(client, prompts[n % 4], started, max_tokens=24))
                for n in range(16)
            ]
            await asyncio.wait_for(started.wait(), 60)
            cluster.workers.pop("prefill-0").kill()
            done = await asyncio.gather(*streams)
        assert [tokens_of(events) for events in done] == [expected[n % 4][:24] for n in range(16)]
        await asyncio.to_thread(cluster.wait_idle)


async def test_a_hung_engine_is_ended_and_a_stopped_worker_is_not(
    start_cluster: StartCluster,
) -> None:
    options = ("--heartbeat-timeout", "1", "--engine-hang-timeout", "3")
    prompts, expected = golden(5, 6)
    with start_cluster(*options, *SHORT_STEPS, "--local-prefill-max-tokens", "0") as cluster:
        worker = cluster.workers["prefill-0"]

        async def stop_under_a_lease(
            processes: list[psutil.Process], number: int, until: Callable[[], bool]
        ) -> None:
            task = asyncio.create_task(complete_all(cluster, prompts[number:][:1], max_tokens=8))
            leased = lambda: worker.state().load.num_leases  # noqa: E731
            await asyncio.to_thread(wait_for, leased, deadline_s=60, what="a lease")
            for process in processes:
                process.suspend()
            await asyncio.to_thread(wait_for, until, deadline_s=30, what="the end of the stop")
            for process in processes:
                if process.is_running():
                    process.resume()
            (answer,) = await task
            assert answer.token_ids == expected[number][:8]

        both = psutil.Process(worker.process.pid)
        engine = both.children()
        resumes_at = time.monotonic() + 6
        await stop_under_a_lease([both, *engine], 0, lambda: time.monotonic() > resumes_at)
        await asyncio.to_thread(cluster.wait_ready)
        # Its only consumer gives up long before the engine is ended, and nobody else comes.
        await stop_under_a_lease(engine, 1, lambda: worker.process.poll() is not None)
        assert worker.process.returncode == 1
        assert "the engine made no progress for" in worker.log.read_text()


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        pytest.param(
            ("--max-num-seqs", "1", "--num-blocks", "60"),
            ("queued", "prefill", "decode"),
            id="computing",
        ),
        # In CI tests/service/test_transports.py has clients that go during a pull.
        pytest.param(
            ("--transfer-delay", "20"), ("transfer",), id="transfer", marks=pytest.mark.slow
        ),
    ],
)
async def test_client_that_disconnects_leaves_nothing(
    start_cluster: StartCluster, options: tuple[str, ...], phases: tuple[str, ...]
) -> None:
    with start_cluster(*SHORT_STEPS, *options) as cluster:
        decode = cluster.workers["decode-0"]
        prefill = cluster.workers["prefill-0"]
        reached: dict[str, Callable[[], object]] = {
            "queued": lambda: decode.state().load.num_waiting,
            "prefill": lambda: prefill.state().load.num_leases,
            "transfer": lambda: decode.state().load.num_pulls and decode.state().load.blocks_used,
            "decode": lambda: decode.state().load.num_running,
        }
        for number, phase in enumerate(phases):
            prompt = [number, *PROMPT[1:]]  # nothing of it is cached
            async with open_client(cluster) as client:
                streams = [
                    asyncio.create_task(collect(client, prompt, asyncio.Event(), max_tokens=400))
                    for _ in range(4 if phase == "queued" else 1)
                ]
                await asyncio.to_thread(
                    wait_for, reached[phase], deadline_s=60, what=f"phase {phase}"
                )
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)
            try:
                await asyncio.to_thread(
                    wait_for,
                    lambda: not any(map(any, held(cluster).values())),
                    deadline_s=FREED_DEADLINE_S,
                    what="release",
                )
            except TimeoutError:
                pytest.fail(f"still held after a disconnect in phase {phase}: {held(cluster)}")


@pytest.mark.slow  # in CI tests/chaos has two and two, and test_roles.py a worker that joins
async def test_two_and_two_serve_64_and_workers_join_meanwhile(start_cluster: StartCluster) -> None:
    prompts, expected = golden(0, 1, 2, 3, 4, 5)
    with start_cluster(prefill=2, decode=2) as cluster:
        load = asyncio.create_task(
            complete_all(cluster, [prompts[n % 6] for n in range(64)], max_tokens=16)
        )
        cluster.start_worker("prefill-2", "prefill")
        cluster.start_worker("decode-2", "decode")
        await asyncio.to_thread(cluster.wait_ready)
        answers = await load
        assert [a.token_ids for a in answers] == [expected[n % 6][:16] for n in range(64)]
        late = await complete_all(cluster, prompts, max_tokens=16)
        assert [a.token_ids for a in late] == [tokens[:16] for tokens in expected]
        await asyncio.to_thread(cluster.wait_idle)


@pytest.mark.parametrize(
    "is_engine_only",
    [pytest.param(False, id="stopped"), pytest.param(True, id="hung", marks=pytest.mark.slow)],
)
async def test_decode_workers_prefill_at_once_when_both_prefill_workers_are_lost(
    is_engine_only: bool, start_cluster: StartCluster
) -> None:
    """Two requests wait, one for each; the next request waits for neither."""
    prompts, expected = golden(5, 6)
    options = (*SHORT_STEPS, "--local-prefill-max-tokens", "0", "--engine-hang-timeout", "600")
    with start_cluster(*options, prefill=2) as cluster:
        await complete_all(cluster, [p[:300] for p in prompts], max_tokens=1)  # each has turned

        def count_asked() -> int:
            text: str = cluster.workers["decode-0"].log.read_text()
            return text.count("prompt_prefill: prefill of")

        lost = [psutil.Process(cluster.workers[f"prefill-{n}"].process.pid) for n in range(2)]
        stopped = [
            p for w in lost for p in (w.children() if is_engine_only else [w, *w.children()])
        ]
        for process in stopped:
            process.suspend()
        began = time.monotonic()
        try:
            answers = await complete_all(cluster, prompts, max_tokens=4)
            num_asked = count_asked()
            found_at = time.monotonic()
            again = await complete_all(cluster, prompts[:1], max_tokens=4)
            took = f"{found_at - began:.1f} s, the next one {time.monotonic() - found_at:.1f} s"
            print(f"requests took {took}")
            assert count_asked() == num_asked, "the next request waited, too"
        finally:
            for process in stopped:
                process.resume()
        tokens = [answer.token_ids for answer in (*answers, *again)]
        assert tokens == [e[:4] for e in (*expected, expected[0])]
        # Both may find out at one moment, and each ask the worker that the other one has given up.
        assert num_asked <= 4
        await asyncio.to_thread(cluster.wait_idle)
