"""A thousand slow connections of one address do not delay other clients."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tandem.net.rpc.tandem.v1 import worker_pb2
from tests.harness.good_clients import GoodClients
from tests.harness.scripted_worker import Say, saying
from tests.harness.slow_clients import KINDS, slow_clients
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

NUM_SLOW = 1000
ROUTER = {"connections_max": NUM_SLOW // 2}
KINDS_TRIED = ("partial-header", "keep-alive", "grpc-idle")
SECONDS = 1.2
# The long form, tests/security/slow_connections.py, requires 1.5 times. On a machine whose cores
# are shared, a second may contain unrelated pauses.
RATIO_MAX = 1.5
PAUSE_MS = 250.0
TIMES_MAX = 3


async def ask(router: RunningRouter) -> GoodClients:
    clients = GoodClients(router.router.http_port, number=30, interval_s=0.6)
    await clients.run(SECONDS)
    assert clients.failures == []
    return clients


@pytest.fixture
def answering(router: RunningRouter) -> RunningRouter:
    numbers = itertools.count(1)

    async def answer(submit: worker_pb2.SubmitSequence, say: Say) -> None:
        await saying([1000])(submit, say)
        for worker in router.workers:
            worker.tell_load(next(numbers))

    router.script(answer)
    return router


async def test_slow_connections_hold_up_nobody_else(answering: RunningRouter) -> None:
    router = answering.router
    bound_ms = RATIO_MAX * (await ask(answering)).percentile_ms(0.99) + PAUSE_MS
    for kind in KINDS_TRIED:
        port = router.grpc_port if KINDS[kind].is_grpc else router.http_port
        attack = slow_clients(kind, port, NUM_SLOW)
        await asyncio.to_thread(attack.__enter__)
        try:
            await ask(answering)  # while the thousand connections arrive, answers may be late
            # A pause of the machine is over at the second or third attempt.
            seen = [(await ask(answering)).percentile_ms(0.99)]
            while seen[-1] >= bound_ms and len(seen) < TIMES_MAX:
                seen.append((await ask(answering)).percentile_ms(0.99))
            assert seen[-1] < bound_ms, (kind, seen)
        finally:
            await asyncio.to_thread(attack.__exit__, None, None, None)
