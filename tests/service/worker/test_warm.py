"""A new worker fills its cache from peers, over real gRPC; the test plays its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.engine.types import Failed, Reserved, StepReport
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.engine_process.messages import CommitImport, ImportBlocks, Remove
from tandem.worker.lifecycle.warm import Warmer
from tests.harness.scripted_producer import (
    CONFIG,
    PrefixConsumer,
    ScriptedSource,
    accepted,
    prefix_consumer_of,
    run,
)

pytestmark = pytest.mark.service

CHAINS = [[bytes([n]) * 16 for n in range(4)], [bytes([0]) * 16, bytes([9]) * 16]]


async def has_all(commands: AsyncIterator[pb.PrefillCommand], context: Any) -> Any:
    hold = (await anext(aiter(commands))).hold
    first = hold.first_missing_block
    last = len(hold.block_hashes)
    yield accepted()
    yield run(first, *range(100 + first, 100 + last))
    yield pb.PrefillEvent(held=pb.Held(num_blocks=last))
    await anext(aiter(commands))
    yield pb.PrefillEvent(released=pb.Released(epoch="e", lease_id=hold.lease_id, whole=True))


async def cut(commands: AsyncIterator[pb.PrefillCommand], context: Any) -> Any:
    await anext(aiter(commands))
    yield accepted()
    yield run(0, 100)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


def lists(*chains: list[bytes]) -> Any:
    async def list_prefixes(request: pb.ListChainsRequest, context: Any) -> pb.ListChainsResponse:
        assert request.blocks_max > 0
        return pb.ListChainsResponse(chains=[pb.BlockChain(block_hashes=c) for c in chains])

    return list_prefixes


async def warm(consumer: PrefixConsumer, *answers: Any, warm_blocks: int = 10) -> list[Any]:
    """Runs it; `answers` are the engine's to each ImportBlocks, without their sequence's id."""
    metrics = consumer.metrics
    link = consumer.link
    engine: Any = link
    config = replace(CONFIG, transfer=replace(CONFIG.transfer, warm_blocks=warm_blocks))
    warmer = Warmer(config, engine, consumer.puller, metrics)
    running = asyncio.create_task(warmer.run(consumer.peers))
    answered = 0
    async with asyncio.timeout(10):
        while not running.done():
            await asyncio.sleep(0.01)
            adopts = [c for c in link.sent if isinstance(c, ImportBlocks)]
            if len(adopts) > answered:
                answer = answers[answered](adopts[answered].sequence_id)
                kind = "failed" if isinstance(answer, Failed) else "reserved"
                warmer.on_step(StepReport(**{kind: [answer]}))
                answered += 1
    assert running.exception() is None
    return link.sent


def reserves(num_cached_blocks: int, *block_ids: int) -> Any:
    return lambda sequence_id: Reserved(sequence_id, num_cached_blocks * 16, list(block_ids))


def kinds(sent: list[Any]) -> list[str]:
    return [type(command).__name__ for command in sent]


async def test_chains_are_adopted_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedSource, "ListChains", staticmethod(lists(*CHAINS)))
    async with prefix_consumer_of(has_all) as consumer:
        sent = await warm(consumer, reserves(0, 5, 6, 7, 8), reserves(1, 9))
        commits = [c.num_blocks for c in sent if isinstance(c, CommitImport)]
        assert commits == [4, 2]
        assert [p.producer_block_ids for p in consumer.link.pulls] == [[100, 101, 102, 103], [101]]
        assert [c.block_hashes for c in sent if isinstance(c, ImportBlocks)] == CHAINS


async def test_where_there_is_less_room_less_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedSource, "ListChains", staticmethod(lists(*CHAINS)))
    async with prefix_consumer_of(has_all) as consumer:
        sent = await warm(consumer, reserves(0, 5, 6), reserves(1))
        assert [c.num_blocks for c in sent if isinstance(c, CommitImport)] == [2]


async def test_enough_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedSource, "ListChains", staticmethod(lists(*CHAINS)))
    async with prefix_consumer_of(has_all) as consumer:
        sent = await warm(consumer, reserves(0, 5, 6, 7, 8), warm_blocks=4)
        assert kinds(sent).count("ImportBlocks") == 1


async def test_a_lost_hold_is_given_up_and_the_next_peer_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ScriptedSource, "ListChains", staticmethod(lists(*CHAINS)))
    async with prefix_consumer_of(cut, has_all) as consumer:
        sent = await warm(
            consumer, reserves(0, 5, 6, 7, 8), reserves(0, 5, 6, 7, 8), reserves(1, 9)
        )
        assert kinds(sent)[:3] == ["ImportBlocks", "Remove", "ImportBlocks"]
        assert [c.num_blocks for c in sent if isinstance(c, CommitImport)] == [4, 2]


async def test_an_engine_that_refuses_leaves_it_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedSource, "ListChains", staticmethod(lists(*CHAINS)))
    async with prefix_consumer_of(has_all) as consumer:
        sent = await warm(consumer, lambda sequence_id: Failed(sequence_id, "queue_full", "full"))
        assert isinstance(sent[-1], Remove)
        assert "CommitImport" not in kinds(sent)
        assert consumer.producers[0].num_streams == 0


async def test_a_peer_that_lists_nothing_is_passed_over() -> None:
    async with prefix_consumer_of(has_all) as consumer:  # ListChains is not implemented there
        assert await warm(consumer) == []
