"""The producer's side of leases over real gRPC; the test plays its engine and its consumers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import msgspec
import pytest

from tandem.common.cached_tokens import CachedTokens
from tandem.common.config.transfer import TransferConfig
from tandem.common.perf_model.rates import PrefillRate, WorkerRates
from tandem.engine.types import (
    Admitted,
    Failed,
    FinalBlocks,
    Held,
    Prefilled,
    Reserved,
    SequenceSpec,
    StepReport,
)
from tandem.net.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import (
    WorkerServicer,
    WorkerStub,
    add_WorkerServicer_to_server,
)
from tandem.worker.engine_process.messages import Add, ContinuePrefill, HoldPrefix, Remove, Report
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.parts import WorkerParts
from tandem.worker.peers.rates import Rates
from tandem.worker.prefill.prefix_choice import PrefixPlan
from tandem.worker.prefill.service import PrefillService
from tests.harness.scripted_producer import BLOCK_BYTES, CONFIG, PROMPT, RecordingLink

pytestmark = pytest.mark.service

NUM_BLOCKS = 20


@dataclass
class Prefixes:
    """A PrefixPuller that pulls what the test says, when it says so."""

    num_blocks: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def plan(self, spec: SequenceSpec, holders: Any) -> PrefixPlan | None:
        if not holders:
            return None
        return PrefixPlan(msgspec.structs.replace(spec, prefix_blocks=holders[0].num_blocks), [])

    async def fill(self, plan: PrefixPlan, reserved: Reserved) -> int:
        return await asyncio.shield(self.num_blocks)


@dataclass
class Producer(WorkerServicer):
    service: PrefillService
    link: RecordingLink
    prefixes: Prefixes
    stub: WorkerStub | None = None
    step: int = 0

    async def Prefill(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.PrefillEvent]:  # noqa: N802
        async for event in self.service.serve(request_iterator, context):
            yield event

    def report(self, **fields: Any) -> None:
        self.step += 1
        self.service.on_report(Report(self.step, StepReport(**fields)))

    async def sent(self, kind: type) -> Any:
        """The first command of this kind that the engine got."""
        async with asyncio.timeout(5):
            while not (found := [c for c in self.link.sent if isinstance(c, kind)]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found[0]


@asynccontextmanager
async def producer_of(**transfer: Any) -> AsyncIterator[Producer]:
    config = CONFIG
    if transfer:
        fields = {"heartbeat_interval_s": 0.1, **transfer}
        config = type(CONFIG)(
            role="prefill",
            cluster=CONFIG.cluster,
            engine=CONFIG.engine,
            transfer=TransferConfig(**fields),
            worker_id="p0",
        )
    link: Any = RecordingLink()
    prefixes: Any = Prefixes()
    rates = Rates(config, WorkerRates(block_bytes=BLOCK_BYTES))
    measured = WorkerRates(
        PrefillRate(0.0, 0.25 / 512, 0.0), block_bytes=BLOCK_BYTES, measured=True
    )
    rates.on_step(StepReport(num_prefill_tokens=512, step_ms=250.0, rates=measured))
    metrics = WorkerMetrics(worker_id="p0", role="prefill")
    parts = WorkerParts(config, link, rates, metrics)
    service = PrefillService(parts, prefixes, epoch="e", num_blocks=NUM_BLOCKS)
    producer = Producer(service, link, prefixes)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(producer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        producer.stub = WorkerStub(channel)
        yield producer
    await server.stop(None)


def start(lease_id: str = "l", **fields: Any) -> pb.PrefillCommand:
    sequence = pb.SequenceInput(token_ids=PROMPT, num_prompt_tokens=len(PROMPT), max_tokens=1)
    fields = {"consumer_worker_id": "d0", **fields}
    return pb.PrefillCommand(start=pb.StartPrefill(lease_id=lease_id, input=sequence, **fields))


def hold(lease_id: str) -> pb.PrefillCommand:
    chain = [b"h" * 16]
    opening = pb.HoldBlocks(lease_id=lease_id, block_hashes=chain, consumer_worker_id="p1")
    return pb.PrefillCommand(hold=opening)


RELEASE = pb.PrefillCommand(release=pb.ReleaseLease())


async def next_event(call: Any) -> pb.PrefillEvent:
    """Returns the next event that is no heartbeat."""
    async with asyncio.timeout(5):
        while (event := await call.read()) is not grpc.aio.EOF:
            if not event.HasField("heartbeat"):
                return event
    raise AssertionError("the stream ended")


async def opened(producer: Producer, command: pb.PrefillCommand) -> Any:
    assert producer.stub is not None
    call = producer.stub.Prefill()
    await call.write(command)
    assert (await next_event(call)).accepted.epoch == "e"
    return call


async def refusal(producer: Producer, command: pb.PrefillCommand) -> pb.Refused:
    assert producer.stub is not None
    call = producer.stub.Prefill()
    await call.write(command)
    event = await next_event(call)
    assert event.HasField("refused"), event
    return event.refused


async def test_release_before_prefilled_is_answered_right_after_it() -> None:
    async with producer_of() as producer:
        call = await opened(producer, start())
        producer.report(final_blocks=[FinalBlocks("l", 0, [3, 4])])
        assert list((await next_event(call)).run.block_ids) == [3, 4]
        await call.write(RELEASE)
        producer.report(final_blocks=[FinalBlocks("l", 2, [5])])
        assert list((await next_event(call)).run.block_ids) == [5]  # and no `released` before it
        assert not any(isinstance(c, Remove) for c in producer.link.sent)
        producer.report(prefilled=[Prefilled("l", 9, CachedTokens(16))])
        prefilled = (await next_event(call)).prefilled
        assert (prefilled.first_token_id, prefilled.cached_tokens) == (9, 16)
        released = (await next_event(call)).released
        assert (released.epoch, released.lease_id, released.whole) == ("e", "l", True)
        assert (await producer.sent(Remove)).sequence_id == "l"
        assert producer.service.num_leases == 0


async def test_a_hold_names_what_is_here_and_keeps_it_until_released() -> None:
    async with producer_of() as producer:
        hashes = [bytes([n]) * 16 for n in range(5)]
        hold = pb.HoldBlocks(
            lease_id="h", block_hashes=hashes, first_missing_block=1, consumer_worker_id="d0"
        )
        call = await opened(producer, pb.PrefillCommand(hold=hold))
        assert await producer.sent(HoldPrefix) == HoldPrefix("h", hashes, 1)
        producer.report(final_blocks=[FinalBlocks("h", 1, [7, 8])], held=[Held("h", 3)])
        run = (await next_event(call)).run
        assert (run.first_block, list(run.block_ids)) == (1, [7, 8])
        assert (await next_event(call)).held.num_blocks == 3
        assert not any(isinstance(c, Remove) for c in producer.link.sent)
        await call.write(RELEASE)
        assert (await next_event(call)).released.whole
        assert (await producer.sent(Remove)).sequence_id == "h"


async def test_heartbeats_carry_the_step_and_the_longest_turn() -> None:
    async with producer_of() as producer:
        producer.report()
        call = await opened(producer, start())
        beat = (await asyncio.wait_for(call.read(), 5)).heartbeat
        assert (beat.step, round(beat.turn_s_max, 3)) == (1, 0.25)


async def test_a_prefix_is_awaited_and_then_the_rest_computed() -> None:
    async with producer_of() as producer:
        holder = pb.PrefixHolder(worker_id="d0", num_blocks=4)
        await opened(producer, start(prefix_holders=[holder]))
        assert (await producer.sent(Add)).spec.prefix_blocks == 4
        producer.report(reserved=[Reserved("l", 16, [1, 2, 3, 4, 5, 6])])
        producer.prefixes.num_blocks.set_result(4)
        assert await producer.sent(ContinuePrefill) == ContinuePrefill("l", 4)


async def test_the_wait_for_a_prefix_ends_with_its_stream() -> None:
    async with producer_of() as producer:
        holder = pb.PrefixHolder(worker_id="d0", num_blocks=4)
        call = await opened(producer, start(prefix_holders=[holder]))
        await producer.sent(Add)
        producer.report(reserved=[Reserved("l", 0, list(range(7)))])
        call.cancel()
        assert (await producer.sent(Remove)).sequence_id == "l"
        producer.prefixes.num_blocks.set_result(4)
        await asyncio.sleep(0)
        assert not any(isinstance(c, ContinuePrefill) for c in producer.link.sent)
        assert producer.service.num_leases == 0


async def test_a_lease_whose_prefix_breaks_is_refused() -> None:
    """Nobody would tell the engine to go on without the prefix, and heartbeats would go on."""
    async with producer_of() as producer:
        holder = pb.PrefixHolder(worker_id="d0", num_blocks=4)
        call = await opened(producer, start(prefix_holders=[holder]))
        await producer.sent(Add)
        producer.report(reserved=[Reserved("l", 0, list(range(7)))])
        producer.prefixes.num_blocks.set_exception(RuntimeError("a bug"))
        refused = (await next_event(call)).refused
        assert refused.message == "internal_error: the prefill failed: RuntimeError('a bug')"
        assert (await producer.sent(Remove)).sequence_id == "l"
        assert producer.service.num_leases == 0


@pytest.mark.parametrize(
    ("limits", "others"),
    [({"leases_max": 2}, ("d1", "d2")), ({"leases_per_consumer_max": 2}, ("d0", "d0"))],
)
async def test_more_leases_than_the_bounds_are_refused(
    limits: dict[str, int], others: tuple[str, ...]
) -> None:
    async with producer_of(**limits) as producer:
        calls = [
            await opened(producer, start(f"l{n}", consumer_worker_id=consumer))
            for n, consumer in enumerate(others)
        ]
        assert (await refusal(producer, start())).wait_estimate_s > 0
        calls[0].cancel()
        await producer.sent(Remove)
        await opened(producer, start())


async def test_a_producer_whose_consumers_lag_refuses_until_one_releases() -> None:
    async with producer_of(leased_blocks_max_share=0.25) as producer:
        slow = await opened(producer, start("slow"))
        producer.report(final_blocks=[FinalBlocks("slow", 0, list(range(7)))])
        other = await opened(producer, start("other"))  # what is being computed is not ahead
        producer.report(prefilled=[Prefilled("slow", 1)])
        assert "wait for their consumers" in (await refusal(producer, start())).message
        await slow.write(RELEASE)
        await producer.sent(Remove)
        await opened(producer, start())
        other.cancel()


async def test_a_draining_producer_refuses_for_good() -> None:
    async with producer_of() as producer:
        producer.service.leave(lambda: True)
        refused = await refusal(producer, start())
        assert ("draining" in refused.message, refused.wait_estimate_s) == (True, 0.0)


async def test_a_producer_that_leaves_hands_back_what_its_engine_has_not_begun() -> None:
    async with producer_of() as producer:
        begun, waits = (
            await opened(producer, start("begun")),
            await opened(producer, start("waits")),
        )
        producer.report(admitted=[Admitted("begun", time.monotonic(), tokens_ahead=700)])
        producer.service.leave(lambda: False)
        refused = (await next_event(waits)).refused
        assert ("draining" in refused.message, refused.wait_estimate_s) == (True, 0.0)
        assert (await producer.sent(Remove)).sequence_id == "waits"
        producer.report(
            final_blocks=[FinalBlocks("begun", 0, [3])], prefilled=[Prefilled("begun", 1)]
        )
        await begun.write(RELEASE)
        assert list((await next_event(begun)).run.block_ids) == [3]
        assert (await next_event(begun)).prefilled.tokens_ahead == 700
        assert (await next_event(begun)).released.whole


async def test_holds_of_a_prefix_that_many_want_do_not_keep_a_drain_going() -> None:
    """There is always one of them under load; new ones are for sequences that leave alone."""
    async with producer_of() as producer:
        sequences = 1
        first = await opened(producer, hold("first"))
        producer.service.leave(lambda: sequences > 0)
        second = await opened(producer, hold("second"))  # by who takes the sequence over
        sequences = 0
        assert "draining" in (await refusal(producer, hold("third"))).message
        for call, lease_id in ((first, "first"), (second, "second")):
            producer.report(held=[Held(lease_id, 0)])
            await call.write(RELEASE)
            assert (await next_event(call)).HasField("held")
            assert (await next_event(call)).released.whole
        async with asyncio.timeout(5):
            while producer.service.num_leases:  # noqa: ASYNC110  (the streams close just now)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("code", "helps"), [("queue_full", True), ("kv_capacity_exceeded", False)])
async def test_an_engine_that_refuses_says_whether_waiting_helps(code: str, helps: bool) -> None:
    async with producer_of() as producer:
        call = await opened(producer, start())
        producer.report(failed=[Failed("l", code, "no")])
        refused = (await next_event(call)).refused
        assert (refused.wait_estimate_s > 0) == helps
        await producer.sent(Remove)


async def test_a_consumer_that_goes_before_it_said_anything_is_no_error() -> None:
    async with producer_of() as producer:
        assert producer.stub is not None
        call = producer.stub.Prefill()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert not producer.service.num_leases


async def test_in_the_decode_pool_it_takes_no_prompts_and_still_lends_what_it_has() -> None:
    async with producer_of() as producer:
        open_before = await opened(producer, start("before"))
        producer.service.takes_prompts = False
        refused = await refusal(producer, start("after"))
        assert refused.message == "this worker has moved to the decode pool and prefills no prompts"
        assert refused.wait_estimate_s == 0
        hold = pb.HoldBlocks(lease_id="held", block_hashes=[b"h" * 16], consumer_worker_id="d0")
        await opened(producer, pb.PrefillCommand(hold=hold))
        assert producer.service.num_leases == 2
        open_before.cancel()
