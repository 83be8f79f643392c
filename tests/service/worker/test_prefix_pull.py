"""A prefix from a holder that misbehaves at each step: it is computed instead, none leaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest

from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tests.grouped_toy import STATE, GroupedToyRunner
from tests.harness.scripted_producer import (
    COMPATIBILITY,
    PREFIX_BLOCKS,
    PrefixConsumer,
    accepted,
    prefix_consumer_of,
    run,
)

pytestmark = pytest.mark.service

Commands = AsyncIterator[pb.PrefillCommand]
Events = AsyncIterator[pb.PrefillEvent]
BLOCKS = tuple(range(10, 10 + PREFIX_BLOCKS))


def held(num_blocks: int = PREFIX_BLOCKS) -> pb.PrefillEvent:
    return pb.PrefillEvent(held=pb.Held(num_blocks=num_blocks))


def released(lease_id: str, *, epoch: str = "e", whole: bool = True) -> pb.PrefillEvent:
    return pb.PrefillEvent(released=pb.Released(epoch=epoch, lease_id=lease_id, whole=whole))


async def whole(commands: Commands, context: Any) -> Events:
    hold = (await anext(aiter(commands))).hold
    yield accepted()
    first = hold.first_missing_block
    yield run(first, *BLOCKS[first:])
    yield held()
    assert (await anext(aiter(commands))).WhichOneof("command") == "release"
    yield released(hold.lease_id)


async def closed(consumer: PrefixConsumer) -> None:
    async with asyncio.timeout(5):
        while any(producer.num_open for producer in consumer.producers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_cached", [0, 2])
async def test_a_whole_hold_is_good(num_cached: int) -> None:
    async with prefix_consumer_of(whole) as consumer:
        assert await consumer.fill(num_cached=num_cached) == PREFIX_BLOCKS
        (pull,) = consumer.link.pulls
        assert pull.local_block_ids == list(range(num_cached, PREFIX_BLOCKS))
        assert pull.producer_block_ids == list(BLOCKS[num_cached:])
        assert consumer.pulled() == PREFIX_BLOCKS - num_cached
        await closed(consumer)


async def test_a_holder_that_has_less_gives_less() -> None:
    async def less(commands: Commands, context: Any) -> Events:
        hold = (await anext(aiter(commands))).hold
        yield accepted()
        yield run(0, *BLOCKS[:3])
        yield held(3)
        await anext(aiter(commands))
        yield released(hold.lease_id)

    async with prefix_consumer_of(less) as consumer:
        assert await consumer.fill() == 3


@pytest.mark.parametrize("num_held", [0, 2])
async def test_a_holder_that_has_nothing_new_is_released_at_once(num_held: int) -> None:
    async def nothing(commands: Commands, context: Any) -> Events:
        hold = (await anext(aiter(commands))).hold
        yield accepted()
        yield held(num_held)
        await anext(aiter(commands))
        yield released(hold.lease_id)

    async with prefix_consumer_of(nothing) as consumer:
        assert await consumer.fill(num_cached=2) == 2
        assert consumer.link.pulls == []
        await closed(consumer)


@pytest.mark.parametrize(
    ("name", "events"),
    [
        ("a gap", [run(0, 1), run(2, 3), held()]),
        ("too few", [run(0, *BLOCKS[:4]), held()]),
        ("too many", [run(0, *BLOCKS, 99), held()]),
        ("more than asked for", [run(0, *BLOCKS), held(PREFIX_BLOCKS + 1)]),
        ("twice", [run(0, *BLOCKS), held(), held()]),
        ("a first token", [run(0, *BLOCKS), pb.PrefillEvent(prefilled=pb.Prefilled())]),
        ("no answer", [run(0, *BLOCKS), released("mine")]),
        ("another epoch", [run(0, *BLOCKS), held(), released("mine", epoch="other")]),
        ("another lease", [run(0, *BLOCKS), held(), released("other")]),
        ("not whole", [run(0, *BLOCKS), held(), released("mine", whole=False)]),
        ("refused", [pb.PrefillEvent(refused=pb.Refused(message="full"))]),
        ("closed", [run(0, 1)]),
    ],
)
async def test_a_hold_that_is_not_whole_gives_nothing(
    name: str, events: list[pb.PrefillEvent]
) -> None:
    async def wrong(commands: Commands, context: Any) -> Events:
        lease_id = (await anext(aiter(commands))).hold.lease_id
        yield accepted()
        for event in events:
            if event.HasField("released") and event.released.lease_id == "mine":
                event.released.lease_id = lease_id
            yield event
        if name not in ("closed", "refused"):
            async for _ in commands:
                pass

    async with prefix_consumer_of(wrong) as consumer:
        assert await consumer.fill(num_cached=0) == 0, name
        assert consumer.pulled() == 0
        await closed(consumer)


async def test_a_stream_cut_in_the_middle_gives_nothing() -> None:
    async def cut(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        yield run(0, *BLOCKS[:3])
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with prefix_consumer_of(cut) as consumer:
        assert await consumer.fill(num_cached=1) == 1


async def test_a_silent_holder_is_given_up() -> None:
    async def silent(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        await asyncio.Event().wait()

    async with prefix_consumer_of(silent) as consumer:
        assert await consumer.fill() == 0
        await closed(consumer)


async def test_a_holder_that_beats_but_never_answers_is_given_up() -> None:
    async def late(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        for step in range(10_000):
            await asyncio.sleep(0.05)
            yield pb.PrefillEvent(heartbeat=pb.Heartbeat(step=step))

    async with prefix_consumer_of(late) as consumer:
        assert await asyncio.wait_for(consumer.fill(), 5) == 0
        await closed(consumer)


async def test_a_holder_that_refuses_gives_way_to_the_next() -> None:
    async def refuses(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield pb.PrefillEvent(refused=pb.Refused(message="full"))

    async with prefix_consumer_of(refuses, whole) as consumer:
        assert await consumer.fill() == PREFIX_BLOCKS


async def test_a_holder_that_has_nothing_new_gives_way_to_the_next() -> None:
    async def nothing(commands: Commands, context: Any) -> Events:
        hold = (await anext(aiter(commands))).hold
        yield accepted()
        yield held(0)
        await anext(aiter(commands))
        yield released(hold.lease_id)

    async with prefix_consumer_of(nothing, whole) as consumer:
        assert await consumer.fill() == PREFIX_BLOCKS


async def test_no_second_read_goes_where_a_first_may_land() -> None:
    async def breaks(commands: Commands, context: Any) -> Events:
        await anext(aiter(commands))
        yield accepted()
        yield run(0, *BLOCKS[:3])
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with prefix_consumer_of(breaks, whole) as consumer:
        assert await consumer.fill() == 0
        assert consumer.producers[1].num_streams == 0


async def test_cancelling_closes_the_stream() -> None:
    async with prefix_consumer_of(whole, pull_s=60.0) as consumer:
        filling = asyncio.create_task(consumer.fill())
        async with asyncio.timeout(5):
            while not consumer.link.pulls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        filling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await filling
        await closed(consumer)


async def test_what_is_computed_sooner_is_not_pulled() -> None:
    async with prefix_consumer_of(whole) as consumer:
        assert consumer.plan(num_blocks=0) is None
        plan = consumer.plan(num_blocks=PREFIX_BLOCKS)
        assert plan is not None
        assert plan.spec.prefix_blocks == PREFIX_BLOCKS


async def test_a_load_from_a_tier_counts_and_the_holder_knows_how_long_it_may_take() -> None:
    allowed: list[float] = []

    async def loads(commands: Commands, context: Any) -> Events:
        hold = (await anext(aiter(commands))).hold
        allowed.append(hold.load_s_max)
        yield accepted()
        yield run(0, *BLOCKS)
        yield held()
        await anext(aiter(commands))
        yield released(hold.lease_id)

    async with prefix_consumer_of(loads) as consumer:
        plain, slow = consumer.plan(), consumer.plan(load_s=1e-3)
        assert plain is not None
        assert slow is not None
        assert plain.spec.offer is not None
        assert slow.spec.offer is not None
        assert slow.spec.offer.latency_s == pytest.approx(plain.spec.offer.latency_s + 1e-3)
        assert await consumer.fill() == PREFIX_BLOCKS
        assert allowed[0] > 1e-3
        # A longer load than that is not worth a pull.
        assert consumer.plan(load_s=0.99 * allowed[0]) is not None
        assert consumer.plan(load_s=1.01 * allowed[0]) is None


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "depth"),
    # States are frozen after multiples of 64 tokens, which are 4 blocks; the last token of a prompt
    # is computed.
    [(3, 200, 0), (4, 200, 4), (7, 200, 4), (12, 200, 12), (12, 193, 12), (12, 192, 8)],
)
async def test_with_states_a_prefix_ends_where_a_holder_can_have_a_state(
    num_blocks: int, num_tokens: int, depth: int
) -> None:
    """A router names all blocks of a worker that drains."""
    layout = GroupedToyRunner((None, STATE), block_size=16).layout()
    states = msgspec.structs.replace(COMPATIBILITY, layout=layout.describe())
    async with prefix_consumer_of(whole, compatibility=states) as consumer:
        plan = consumer.plan(num_blocks=num_blocks, prompt=list(range(num_tokens)))
        assert (0 if plan is None else plan.spec.prefix_blocks) == depth
        holder = pb.PrefixHolder(worker_id="w", address="here", num_blocks=num_blocks)
        found = consumer.puller.resumable([holder], num_tokens)
        assert [(each.address, each.num_blocks) for each in found] == [("here", depth)][: depth > 0]
