"""A consumer whose producer misbehaves at a chosen moment: each request goes on or ends, none
leaks.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.engine.types import Mode
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.registry import WorkerRecord
from tandem.worker.engine_process.messages import Add, Restart
from tests.harness.scripted_producer import (
    COMPATIBILITY,
    CONFIG,
    PREFIX_BLOCKS,
    Consumer,
    accepted,
    consumer_of,
    prefilled,
    run,
)

pytestmark = pytest.mark.service

Commands = AsyncIterator[pb.PrefillCommand]
Events = AsyncIterator[pb.PrefillEvent]
ALL_BLOCKS = (1, 2, 3, 4, 5, 6, 7)


async def released(commands: Commands, lease_id: str, *, epoch: str = "e") -> pb.PrefillEvent:
    await anext(aiter(commands))  # release
    return pb.PrefillEvent(released=pb.Released(epoch=epoch, lease_id=lease_id, whole=True))


async def whole(commands: Commands, context: Any) -> Events:
    start = (await anext(aiter(commands))).start
    yield accepted()
    yield run(0, *ALL_BLOCKS[:3])
    yield run(3, *ALL_BLOCKS[3:])
    yield prefilled()
    yield await released(commands, start.lease_id)


async def ended(consumer: Consumer) -> None:
    """The prefill task of the one request ended, and the producer sees no stream."""
    async with asyncio.timeout(5):
        while consumer.num_prefilling or consumer.producer.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def tokens(consumer: Consumer) -> list[int]:
    return [token for update in consumer.stream.updates for token in update.token_ids]


async def test_a_whole_lease_commits() -> None:
    async with consumer_of(whole) as consumer:
        await asyncio.wait_for(consumer.submit(), 20)
        assert consumer.link.names() == ["Commit"]
        assert tokens(consumer) == [5]
        assert consumer.metrics.tally.counts.nixl.num_unconfirmed == 0
        await ended(consumer)


async def test_an_engine_with_tiers_hears_what_peers_would_give() -> None:
    """Nobody is left to ask after the lease failed: the prompt waits for nobody then."""

    async def fails(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        yield run(0, *ALL_BLOCKS[:3])
        await context.abort(grpc.StatusCode.INTERNAL, "as the test wants it")

    transfer = replace(CONFIG.transfer, prefill_at="auto", local_prefill_max_tokens=0)
    engine = replace(CONFIG.engine, kv_host_bytes=1 << 20)
    config = replace(CONFIG, transfer=transfer, engine=engine)
    async with consumer_of(fails, config=config) as consumer:
        await asyncio.wait_for(consumer.submit(has_holder=True), 20)
        added, restarted = (c.spec for c in consumer.link.sent if isinstance(c, (Add, Restart)))
        assert added.offer is not None
        assert added.offer.num_blocks == PREFIX_BLOCKS
        assert added.producer is not None
        assert added.producer.num_blocks == PREFIX_BLOCKS  # it has them, too
        assert (restarted.mode, restarted.producer) == (Mode.LOCAL, None)
        await ended(consumer)
    for other in (CONFIG, replace(config, transfer=CONFIG.transfer)):  # no tier; asked anyway
        async with consumer_of(whole, config=other) as consumer:
            await asyncio.wait_for(consumer.submit(has_holder=True), 20)
            (added,) = (c.spec for c in consumer.link.sent if isinstance(c, Add))
            assert (added.offer, added.producer) == (None, None)


async def test_release_waits_for_the_reads() -> None:
    async with consumer_of(whole, pull_s=0.5) as consumer:
        task = consumer.submit()
        async with asyncio.timeout(5):
            while not tokens(consumer):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert consumer.link.names() == []  # the first token is out, nothing is committed
        await asyncio.wait_for(task, 20)
        assert consumer.link.names() == ["Commit"]


async def test_release_comes_when_all_is_read_and_not_later() -> None:
    """The producer has not sampled the first token yet: nothing is left to wait for after it."""

    async def late(commands: Commands, context: Any) -> Events:
        start = (await anext(aiter(commands))).start
        yield accepted()
        yield run(0, *ALL_BLOCKS)
        answer = await released(commands, start.lease_id)
        yield prefilled()
        yield answer

    async with consumer_of(late) as consumer:
        await asyncio.wait_for(consumer.submit(), 20)
        assert consumer.link.names() == ["Commit"]
        assert tokens(consumer) == [5]


@pytest.mark.parametrize("overlap", [True, False])
async def test_pulls_begin_at_once_or_when_the_prompt_is_computed(overlap: bool) -> None:
    config = replace(CONFIG, transfer=replace(CONFIG.transfer, overlap=overlap))
    computed = asyncio.Event()

    async def computes(commands: Commands, context: Any) -> Events:
        start = (await anext(aiter(commands))).start
        yield accepted()
        yield run(0, *ALL_BLOCKS)
        await computed.wait()
        yield prefilled()
        yield await released(commands, start.lease_id)

    async with consumer_of(computes, config=config) as consumer:
        lease = consumer.submit()
        if overlap:
            async with asyncio.timeout(20):
                while not consumer.link.pulls:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        else:
            await asyncio.sleep(0.3)  # the consumer has the run
            assert not consumer.link.pulls
        computed.set()
        await asyncio.wait_for(lease, 20)
        assert consumer.link.names() == ["Commit"]


async def test_released_before_prefilled_never_commits() -> None:
    async def early(commands: Commands, context: Any) -> Events:
        start = (await anext(aiter(commands))).start
        yield accepted()
        yield run(0, *ALL_BLOCKS)
        yield await released(commands, start.lease_id)

    async with consumer_of(early) as consumer:
        await asyncio.wait_for(consumer.submit(), 20)
        assert consumer.link.names() == ["Restart"]
        assert tokens(consumer) == []


async def test_released_that_never_comes_is_not_waited_for_long() -> None:
    async def forgets(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        yield run(0, *ALL_BLOCKS)
        await anext(aiter(commands))  # release
        yield prefilled()
        for step in range(10_000):
            await asyncio.sleep(0.05)
            yield pb.PrefillEvent(heartbeat=pb.Heartbeat(step=step))

    async with consumer_of(forgets) as consumer:
        await asyncio.wait_for(consumer.submit(), 20)
        assert consumer.link.names() == ["Restart"]
        assert consumer.link.sent[-1].spec.token_ids[-1] == 5  # type: ignore[union-attr]
        assert consumer.metrics.tally.counts.nixl.num_unconfirmed == 1
        await ended(consumer)


async def test_a_second_first_token_is_nobodys() -> None:
    async def twice(commands: Commands, context: Any) -> Events:
        start = (await anext(aiter(commands))).start
        yield accepted()
        yield run(0, *ALL_BLOCKS)
        yield prefilled(5)
        yield prefilled(6)
        yield await released(commands, start.lease_id)

    async with consumer_of(twice) as consumer:
        await asyncio.wait_for(consumer.submit(), 20)
        assert tokens(consumer) == [5]
        assert "Commit" not in consumer.link.names()


@pytest.mark.parametrize("is_prefilled", [False, True])
async def test_an_engine_that_stands_still_is_given_up_while_it_computes(
    is_prefilled: bool,
) -> None:
    """Nothing waits for the engine after `prefilled`, so a slow pull continues to its end."""

    async def stands(commands: Commands, context: Any) -> Events:
        start = (await anext(aiter(commands))).start
        yield accepted()
        yield run(0, *ALL_BLOCKS)
        if is_prefilled:
            yield prefilled()
        releasing = asyncio.create_task(released(commands, start.lease_id))
        while not (is_prefilled and releasing.done()):
            await asyncio.sleep(0.05)
            yield pb.PrefillEvent(heartbeat=pb.Heartbeat(step=7, turn_s_max=0.01))
        yield releasing.result()

    async with consumer_of(stands, pull_s=3.0) as consumer:
        await asyncio.wait_for(consumer.submit(), 20)
        assert consumer.link.names() == ["Commit" if is_prefilled else "Restart"]


async def test_a_prefix_is_pulled_before_prefill_here() -> None:
    async def holds(commands: Commands, context: Any) -> Events:
        hold = (await anext(aiter(commands))).hold
        yield accepted()
        yield run(0, *ALL_BLOCKS[:6])
        yield pb.PrefillEvent(held=pb.Held(num_blocks=6))
        yield await released(commands, hold.lease_id)

    async with consumer_of(holds) as consumer:
        await asyncio.wait_for(consumer.submit_here(), 5)
        assert consumer.link.names() == ["ContinuePrefill"]
        assert consumer.link.sent[-1].num_blocks == 6  # type: ignore[union-attr]
        assert consumer.link.sent[0].spec.prefix_blocks == 6  # type: ignore[union-attr]
        await ended(consumer)


@pytest.mark.parametrize("how", ["abort", "server", "channel"])
async def test_producer_lost_while_the_last_pull_runs(how: str) -> None:
    """The read still ends DONE, but nobody confirms the lease: prefilled here, after the token."""

    async def dies(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        yield run(0, *ALL_BLOCKS)
        yield prefilled()
        if how == "abort":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        await anext(aiter(commands))

    async with consumer_of(dies, pull_s=0.5) as consumer:
        task = consumer.submit()
        async with asyncio.timeout(5):
            while not tokens(consumer):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if how == "server":
            await consumer.server.stop(None)
        elif how == "channel":
            await consumer.channel.close(None)
        await asyncio.wait_for(task, 20)
        assert consumer.link.names() == ["Restart"]
        assert consumer.link.sent[-1].spec.token_ids[-1] == 5  # type: ignore[union-attr]
        assert consumer.service.num_sequences == 1
        assert not any(u.finish_reason for u in consumer.stream.updates)


async def test_channel_closed_in_mid_lease_is_no_cancellation() -> None:
    async def computes(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        for step in range(10_000):
            await asyncio.sleep(0.05)
            yield pb.PrefillEvent(heartbeat=pb.Heartbeat(step=step))

    async with consumer_of(computes) as consumer:
        task = consumer.submit()
        async with asyncio.timeout(5):
            while not consumer.producer.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await consumer.channel.close(None)
        await asyncio.wait_for(task, 20)
        assert consumer.link.names() == ["StartLocalPrefill"]


@pytest.mark.parametrize(
    ("name", "events"),
    [
        ("too few", [run(0, *ALL_BLOCKS[:6]), prefilled()]),
        ("too many", [run(0, *ALL_BLOCKS, 8), prefilled()]),
        ("a gap", [run(0, 1, 2), run(3, 4, 5, 6, 7), prefilled()]),
        ("twice", [run(0, *ALL_BLOCKS), run(0, *ALL_BLOCKS), prefilled()]),
        ("none", [prefilled()]),
    ],
)
async def test_runs_that_are_not_the_prompt_never_commit(
    name: str, events: list[pb.PrefillEvent]
) -> None:
    async def wrong(commands: Commands, context: Any) -> Events:
        start = (await anext(aiter(commands))).start
        yield accepted()
        for event in events:
            yield event
        yield await released(commands, start.lease_id)

    async with consumer_of(wrong) as consumer:
        await asyncio.wait_for(consumer.submit(), 20)
        assert "Commit" not in consumer.link.names(), name
        assert consumer.link.names()[-1] in ("Restart", "StartLocalPrefill")
        await ended(consumer)


@pytest.mark.parametrize("wrong", ["epoch", "lease", "not whole"])
async def test_released_of_another_lease_never_commits(wrong: str) -> None:
    async def lies(commands: Commands, context: Any) -> Events:
        start = (await anext(aiter(commands))).start
        yield accepted()
        yield run(0, *ALL_BLOCKS)
        yield prefilled()
        event = await released(commands, "other" if wrong == "lease" else start.lease_id)
        event.released.epoch = "other" if wrong == "epoch" else "e"
        event.released.whole = wrong != "not whole"
        yield event

    async with consumer_of(lies) as consumer:
        await asyncio.wait_for(consumer.submit(), 20)
        assert consumer.link.names() == ["Restart"]


@pytest.mark.parametrize("is_confirmed", [False, True], ids=["stream", "stream and record"])
async def test_silent_producer_is_given_up(
    is_confirmed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given up after ten heartbeats, or after four if its record is silent as well. Then it
    is not asked for the first blocks of the prompt either."""

    async def silent(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        if is_confirmed:
            now = time.monotonic()
            silences = consumer.service.planner._silences
            for at in (now - 4, now):
                silences.note([record("p0")], at)
        await asyncio.Event().wait()

    async with consumer_of(silent) as consumer:
        await asyncio.wait_for(consumer.submit(has_holder=is_confirmed), 20)
        assert consumer.link.names() == ["StartLocalPrefill"]
        await ended(consumer)
    found = re.search(r"p0 was silent for ([\d.]+) s", caplog.text)
    assert found, caplog.text
    assert (float(found[1]) < 10 * CONFIG.transfer.heartbeat_interval_s) is is_confirmed


def record(worker_id: str) -> WorkerRecord:
    """Returns a record of a worker's seventh write."""
    return WorkerRecord(
        worker_id=worker_id,
        epoch="e",
        role="prefill",
        state="ready",
        address="",
        metrics_address="",
        host="",
        pid=1,
        model="m",
        max_model_len=1000,
        compatibility=COMPATIBILITY,
        num_writes=7,
    )


async def test_cancels_at_random_moments_leak_neither_task_nor_stream() -> None:
    async def runs(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        for number in range(7):
            await asyncio.sleep(0.003)
            yield run(number, number)
        await asyncio.Event().wait()

    rng = random.Random(5)
    async with consumer_of(runs) as consumer:
        tasks = []
        for first in range(0, 300, 30):
            names = [f"r{first + n}" for n in range(30)]
            tasks += [consumer.submit(name) for name in names]
            for name in names:
                await asyncio.sleep(rng.random() * 0.003)
                consumer.cancel(name)
        await ended(consumer)
        done, pending = await asyncio.wait(tasks, timeout=5)
        assert (len(done), len(pending)) == (300, 0)
        assert consumer.service.num_sequences == 0
