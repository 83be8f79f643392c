"""Long prompts hold up nobody: they end early, with their client, and take turns.

The tokenizer process is stopped while requests arrive, so that their order is certain. What it did
is read from its CPU time, which other processes of the machine do not change.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest
import pytest_asyncio

from tandem.common.worker_load import WorkerLoad
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter, eventually
from tests.service.router.test_tenants import noting

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {"trust_tenant_header": True}
CONTEXT = 8192
steps = itertools.count(1)
TOO_LONG = " 1x" * 170_000  # 510,000 characters and tokens


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def idle_workers(router: RunningRouter) -> AsyncIterator[None]:
    """The workers have a long context and always capacity, so that no request waits for them."""

    async def tell_idle() -> None:
        while True:
            step = next(steps)
            for worker in router.workers:
                worker.load = WorkerLoad(queue_max=8, blocks_total=1000, step=step)
                worker.tell_load(1 << 40)
            await asyncio.sleep(0.02)

    for worker in router.workers:
        worker.max_model_len = CONTEXT
        await worker.write_record()
    await eventually(lambda: router.router.generator.max_model_len == CONTEXT)
    telling = asyncio.create_task(tell_idle())
    yield
    telling.cancel()


@pytest_asyncio.fixture(loop_scope="module")
async def process(router: RunningRouter) -> AsyncIterator[psutil.Process]:
    """The tokenizer process of the router, which is in this process."""
    router.script(saying([1000]))
    assert (await ask(router, fitting(0))).status_code == 200  # it has started
    for worker in router.workers:
        worker.submitted.clear()
    model = router.router.generator.model
    assert model is not None
    (pid,) = model.preparer._processes._executor._processes
    yield psutil.Process(pid)


def fitting(first_id: int) -> str:
    """A long prompt that fits, by its first token."""
    return chr(ord("a") + first_id) + " one" * 4000


async def ask(
    router: RunningRouter, prompt: str, tenant: str = "", **more: object
) -> httpx.Response:
    headers = {"x-tandem-tenant": tenant} if tenant else {}
    body = {"prompt": prompt, "max_tokens": 1, **more}
    return await router.http.post("/v1/completions", json=body, headers=headers)


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def cost_of_whole_s(router: RunningRouter) -> float:
    """CPU seconds to tokenize the whole text that is too long."""

    def encode() -> float:
        began = time.thread_time()
        router.tokenizer.encode(TOO_LONG)
        return time.thread_time() - began

    return await asyncio.to_thread(encode)


async def test_a_prompt_that_cannot_fit_is_tokenized_as_far_as_the_context(
    router: RunningRouter, process: psutil.Process
) -> None:
    began_s = cpu_s(process)
    answer = await ask(router, TOO_LONG)
    taken_s = cpu_s(process) - began_s
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "the prompt has at least " in error["message"]
    assert not router.submitted
    assert taken_s < await cost_of_whole_s(router) / 3


async def test_requests_that_were_abandoned_hold_up_nobody(
    router: RunningRouter, process: psutil.Process
) -> None:
    router.script(saying([1000]))
    with stopped(process):
        began_s = cpu_s(process)
        left = [asyncio.create_task(ask(router, TOO_LONG)) for _ in range(5)]
        await eventually(lambda: router.num_running() == 5)
        for task in left:
            task.cancel()
        await eventually(lambda: router.num_running() == 0)
        other = asyncio.create_task(ask(router, fitting(0)))
        await eventually(lambda: router.num_running() == 1)
    assert (await other).status_code == 200
    # At most one piece of the five was begun.
    assert cpu_s(process) - began_s < await cost_of_whole_s(router) / 2


async def test_a_client_that_leaves_frees_its_place(
    router: RunningRouter, process: psutil.Process
) -> None:
    order: list[int] = []
    router.script(noting(order))
    with stopped(process):
        began_s = cpu_s(process)
        prompts = [fitting(0), TOO_LONG, TOO_LONG, TOO_LONG, fitting(4)]
        asked = []
        for number, prompt in enumerate(prompts):
            asked.append(asyncio.create_task(ask(router, prompt, f"tenant-{number}")))
            await eventually(lambda number=number: router.num_running() == number + 1)  # type: ignore[misc]
        for task in asked[1:4]:
            task.cancel()
        await eventually(lambda: router.num_running() == 2)
    await asyncio.wait(asked)
    assert asked[0].result().status_code == asked[4].result().status_code == 200
    assert len(order) == 2
    assert cpu_s(process) - began_s < await cost_of_whole_s(router) / 2


async def test_a_flood_of_one_tenant_delays_another_by_one_job(
    router: RunningRouter, process: psutil.Process
) -> None:
    order: list[int] = []
    router.script(noting(order))
    with stopped(process):
        asked = []
        for number in range(8):
            tenant = "flood" if number < 7 else "light"
            asked.append(asyncio.create_task(ask(router, fitting(number), tenant)))
            await eventually(lambda number=number: router.num_running() == number + 1)  # type: ignore[misc]
    await asyncio.wait(asked)
    assert [task.result().status_code for task in asked] == [200] * 8
    first_ids = [router.tokenizer.encode(fitting(number))[0] for number in range(8)]
    # Two streams to two workers may change neighbours: the second may arrive as the third.
    assert first_ids[7] in order[:3]


async def test_a_flood_of_long_texts_delays_another_tenant_by_one_piece(
    router: RunningRouter, process: psutil.Process
) -> None:
    router.script(saying([1000]))
    ended: list[str] = []

    async def note(prompt: str, tenant: str, status: int) -> None:
        assert (await ask(router, prompt, tenant)).status_code == status
        ended.append(tenant)

    with stopped(process):
        asked = [asyncio.create_task(note(TOO_LONG, "flood", 400)) for _ in range(5)]
        await eventually(lambda: router.num_running() == 5)
        asked.append(asyncio.create_task(note(fitting(0), "light", 200)))
        await eventually(lambda: router.num_running() == 6)
    await asyncio.gather(*asked)
    assert "light" in ended[:3]


def submitted_ids(router: RunningRouter) -> list[int]:
    (submitted,) = router.submitted
    return list(submitted.input.token_ids)  # type: ignore[attr-defined]


async def test_a_truncated_prompt_is_tokenized_at_its_end_alone(
    router: RunningRouter, process: psutil.Process
) -> None:
    began_s = cpu_s(process)
    assert (await ask(router, TOO_LONG, truncate_prompt_tokens=10)).status_code == 200
    taken_s = cpu_s(process) - began_s
    assert submitted_ids(router) == router.tokenizer.encode(" 1x" * 100)[-10:]
    assert taken_s < await cost_of_whole_s(router) / 3


async def test_a_flood_of_truncated_prompts_delays_another_tenant_by_one_part(
    router: RunningRouter, process: psutil.Process
) -> None:
    """Each keeps as many tokens as fit, so it is tokenized in parts, each in its turn."""
    ended: list[str] = []

    async def note(prompt: str, tenant: str, **more: object) -> None:
        assert (await ask(router, prompt, tenant, **more)).status_code == 200
        ended.append(tenant)

    text = " one" * 120_000
    with stopped(process):
        asked = [
            asyncio.create_task(note(text, "flood", truncate_prompt_tokens=-1)) for _ in range(5)
        ]
        await eventually(lambda: router.num_running() == 5)
        asked.append(asyncio.create_task(note(fitting(0), "light")))
        await eventually(lambda: router.num_running() == 6)
    await asyncio.gather(*asked)
    assert "light" in ended[:3]


@pytest.mark.parametrize("word", ["a", "東京", "1", " "])
async def test_a_text_without_places_to_cut_holds_up_no_other(
    router: RunningRouter, process: psutil.Process, word: str
) -> None:
    """It goes to a process of its own, which is stopped here for as long as others are served."""
    text = word * (100_000 // len(word))
    expected = router.tokenizer.encode(text)[-10:]
    assert (await ask(router, text, truncate_prompt_tokens=10)).status_code == 200
    assert submitted_ids(router) == expected
    model = router.router.generator.model
    assert model is not None
    (pid,) = model.preparer._uncut._executor._processes
    with stopped(psutil.Process(pid)):
        asked = [
            asyncio.create_task(ask(router, text, "flood", truncate_prompt_tokens=10))
            for _ in range(3)
        ]
        await eventually(lambda: model.preparer._uncut.num_waiting == 2)
        assert (await ask(router, fitting(0), "light")).status_code == 200
        assert (await ask(router, TOO_LONG, "light", truncate_prompt_tokens=10)).status_code == 200
        assert not any(task.done() for task in asked)
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 3
