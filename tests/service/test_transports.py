"""One suite for every transport, between real processes: a consumer with its engine, and its
producers.

Whatever one transport alone does is tested apart: NIXL's reads that cannot be taken back in
test_nixl_transfer.py, gRPC's messages in worker/test_pulls.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.errors import LeaseLost, TandemError
from tandem.transfer.nixl.agent import load_nixl
from tests.service.nixl_harness import DEADLINE_S, TRANSPORT
from tests.service.transfer_harness import PATTERN, Consumer, Producer, Pulling, producer_block_ids
from tests.service.transfer_pools import MODELS, NUM_BLOCKS, VARIABLE

pytestmark = pytest.mark.service

MakeSource = Callable[[], Producer]
WHOLE = NUM_BLOCKS


def ways(*names: str) -> list[Any]:
    """Each transport with the blocks of each model; of a second model only by memory in CI."""
    return [
        pytest.param(
            (name, model),
            id=f"{name} of {model}",
            marks=[pytest.mark.slow] if model != MODELS[0] and name != "nixl by memory" else [],
        )
        for name in names
        for model in MODELS
    ]


@pytest.fixture(scope="module", params=ways("cuda_ipc", "nixl by memory", "nixl by tcp", "grpc"))
def consumer(request: pytest.FixtureRequest) -> Iterator[Consumer]:
    way, model = request.param
    transport, _, path = way.partition(" by ")
    if transport == "nixl":
        try:
            load_nixl()
        except TandemError as error:
            pytest.skip(error.message)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, model)
        if path == "tcp":
            environment.setenv("UCX_TLS", "tcp")
        if transport == "cuda_ipc":
            environment.setenv(TRANSPORT, transport)
        consumer = Consumer(transport)
        yield consumer
        consumer.close()


@pytest.fixture(scope="module")
def producer(consumer: Consumer) -> Iterator[Producer]:
    """Outlives its tests."""
    producer = Producer(1)
    yield producer
    producer.close()


@pytest.fixture
def make_producer(consumer: Consumer) -> Iterator[MakeSource]:
    producers: list[Producer] = []

    def make() -> Producer:
        producers.append(Producer(2 + len(producers)))
        return producers[-1]

    yield make
    for producer in producers:
        consumer.runner.run(forget(consumer, producer))
        producer.close()


async def forget(consumer: Consumer, producer: Producer) -> None:
    """Its memory does not stay mapped here, whatever has happened to it."""
    consumer.forget(producer)
    async with asyncio.timeout(DEADLINE_S):
        while consumer.maps(producer):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def nothing_lands(consumer: Consumer) -> None:
    """Nothing is held any more, and whatever was under way before writes no byte."""
    await consumer.whole()
    consumer.blocks[:] = PATTERN
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert (consumer.blocks == PATTERN).all()
        await asyncio.sleep(0.02)


async def brings_exactly(
    consumer: Consumer, producer: Producer, pulling: Pulling, first: int = 0
) -> None:
    """The lease ends well: its blocks are the producer's, all others as they were."""
    await pulling.end()
    local = pulling.table[first:]
    wanted = producer_block_ids(len(pulling.table))[first:]
    assert np.array_equal(consumer.blocks[local], producer.contents[wanted])
    others = np.setdiff1d(np.arange(WHOLE), local)
    assert (consumer.blocks[others] == PATTERN).all()


async def works(consumer: Consumer, producer: Producer) -> None:
    """Nothing is left of what went before, and a whole pool comes from this producer."""
    await nothing_lands(consumer)
    await brings_exactly(consumer, producer, await consumer.begin(producer, WHOLE))
    await consumer.whole()
    assert producer.num_leases() == 0


@pytest.mark.parametrize(
    ("num_blocks", "first_missing"), [(1, 0), (64, 0), (64, 40), (WHOLE, WHOLE - 1)]
)
def test_the_missing_blocks_come_exactly_where_they_belong(
    consumer: Consumer, producer: Producer, num_blocks: int, first_missing: int
) -> None:
    async def check() -> None:
        consumer.blocks[:] = PATTERN
        pulling = await consumer.begin(producer, num_blocks, first_missing=first_missing)
        await brings_exactly(consumer, producer, pulling, first_missing)
        assert pulling.lease.stats.num_blocks == num_blocks - first_missing
        await consumer.whole()
        assert producer.num_leases() == 0

    consumer.runner.run(check())


def test_pulls_from_two_producers_at_once_do_not_mix(
    consumer: Consumer, producer: Producer, make_producer: MakeSource
) -> None:
    async def check(other: Producer) -> None:
        await consumer.peer(other)
        pulls = [await consumer.begin(each, 60) for each in (producer, other)]
        for each, pulling in zip((producer, other), pulls, strict=True):
            await pulling.end()
            wanted = each.contents[producer_block_ids(60)]
            assert np.array_equal(consumer.blocks[pulling.table], wanted)
        await works(consumer, other)

    consumer.runner.run(check(make_producer()))


@pytest.mark.parametrize("last", ["accepted", "run", "prefilled"])
def test_a_lease_lost_before_during_or_after_its_pulls_brings_nothing_to_trust(
    consumer: Consumer, producer: Producer, last: str
) -> None:
    async def check() -> None:
        pulling = await consumer.begin(producer, WHOLE, fate=f"cut:{last}")
        with pytest.raises(LeaseLost):
            await pulling.end()
        await works(consumer, producer)

    consumer.runner.run(check())


@pytest.mark.parametrize("when", ["before", "as the first begins", "during", "after"])
def test_a_producer_killed_is_a_lost_lease_and_others_stay_usable(
    consumer: Consumer, producer: Producer, make_producer: MakeSource, when: str
) -> None:
    async def check(doomed: Producer) -> None:
        await consumer.peer(doomed)
        if when == "before":
            doomed.kill()
        pulling = await consumer.begin(doomed, WHOLE, fate="hang:prefilled")
        stats = pulling.lease.stats
        if when == "as the first begins":
            await pulling.until(lambda: stats.began_at > 0)
        elif when == "during":
            await pulling.until(lambda: stats.num_blocks > 0)
        elif when == "after":
            await pulling.until(lambda: stats.num_blocks == WHOLE)
        doomed.process.kill()  # and not reaped yet
        with pytest.raises(LeaseLost):
            await pulling.end()
        await works(consumer, producer)

    consumer.runner.run(check(make_producer()))


def test_a_client_that_goes_in_mid_pull_leaves_nothing_behind(
    consumer: Consumer, producer: Producer
) -> None:
    async def check() -> None:
        pulling = await consumer.begin(producer, WHOLE)
        await pulling.until(lambda: pulling.lease.stats.began_at > 0)
        pulling.client_goes()
        with pytest.raises(asyncio.CancelledError):
            await pulling.end()
        await works(consumer, producer)

    consumer.runner.run(check())


# Not by memory, where UCX may copy all while it starts the read: test_nixl_transfer.py has a late
# pull there.
@pytest.mark.parametrize("consumer", ways("cuda_ipc", "nixl by tcp", "grpc"), indirect=True)
def test_a_pull_that_outlives_its_deadline_is_lost(consumer: Consumer, producer: Producer) -> None:
    async def check() -> None:
        late = replace(consumer.config.transfer, pull_deadline_s=1e-4)
        pulling = await consumer.begin(producer, WHOLE, transfer=late)
        with pytest.raises(LeaseLost, match=r"did not end within 0.0001 s|DEADLINE_EXCEEDED"):
            await pulling.end()
        await works(consumer, producer)

    consumer.runner.run(check())


def test_blocks_of_a_given_up_pull_are_not_written_once_they_are_anothers(
    consumer: Consumer, producer: Producer, make_producer: MakeSource
) -> None:
    """Its producer stands still meanwhile. What a read may still write stays in quarantine: the
    next sequence gets other blocks, or none."""

    async def check(stopped: Producer) -> None:
        await consumer.peer(stopped)
        pulling = await consumer.begin(stopped, 40, fate="hang:prefilled")
        await pulling.until(lambda: pulling.lease.stats.began_at > 0)
        stopped.pause()
        pulling.client_goes()
        with pytest.raises(asyncio.CancelledError):
            await pulling.end()
        following = await consumer.begin(producer, 40)
        await following.end()
        came = consumer.blocks[following.table].copy()
        assert np.array_equal(came, producer.contents[producer_block_ids(40)])
        stopped.resume()
        await consumer.whole()
        assert np.array_equal(consumer.blocks[following.table], came)
        await works(consumer, stopped)

    consumer.runner.run(check(make_producer()))
