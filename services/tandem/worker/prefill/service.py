"""The producer's side of a lease: `Prefill` streams, and bytes for consumers without NIXL.

A consumer opens a stream `Prefill` for each lease and begins with one of two commands:

    command    purpose                 stages of the lease
    `start`    compute a prompt        leased, computing, prefilled, released
    `hold`     keep cached blocks      leased, held, released

The producer can refuse either command instead of granting a lease. Before it computes a prompt, it
may pull a cached prefix of the prompt from a third worker. A `hold` does not wait in the engine's
queue. It allocates blocks only to load those that the tiers have, and does not wait for them.

The consumer sends `release` when it has read all blocks. The answer `released` confirms that every
block was held until then.

However the stream ends, the `finally` clause of `serve` removes the sequence from the engine, which
then frees the blocks. So no block outlives the stream.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

import grpc

from tandem.engine.types import Failed, FinalBlocks, Held, Mode, Prefilled, Reserved
from tandem.errors import BadRequest, InternalError, NoWorkers, QueueFull
from tandem.net.observability.logs import about
from tandem.net.observability.traces import NO_SPAN
from tandem.net.rpc.convert import to_message, trace_headers
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.grpc.producer import BlockServer
from tandem.worker.convert import sequence_spec
from tandem.worker.engine_process import messages
from tandem.worker.kv_pulls.checksums import checksums
from tandem.worker.parts import WorkerParts
from tandem.worker.prefill.leases import Lease, Leases
from tandem.worker.prefill.prefix_choice import PrefixPlan
from tandem.worker.prefill.prefix_pull import PrefixPuller
from tandem.worker.transit import Transit

log = logging.getLogger(__name__)

_START_DEADLINE_S = 5.0
_TRANSITS_MAX = 1000
_DRAINS = "this worker is draining"


class PrefillService:
    """Serves all leases of this worker in its role as a producer."""

    def __init__(
        self, parts: WorkerParts, prefixes: PrefixPuller | None, *, epoch: str, num_blocks: int
    ) -> None:
        """`num_blocks` is the size of the KV pool.

        If `prefixes` is None, no prefixes are pulled from peers, and whole prompts are computed.
        """
        self._config = parts.config
        self._epoch = epoch
        self._link = parts.link
        self._metrics = parts.metrics
        self._rates = parts.rates
        self._prefixes = prefixes
        self._tracing = parts.tracing
        self._leases = Leases(parts.config.transfer, num_blocks=num_blocks)
        self.blocks = BlockServer(
            parts.link,
            self._leases.lent,
            parts.metrics.kv_bytes_served.inc,
        )
        # address of a consumer's connection -> delays of the messages on it
        self._transits: dict[str, Transit] = {}
        self._tick = 0
        self._draining = False
        self._serves_holds: Callable[[], bool] = lambda: True
        # False while this worker is in the decode pool after a change of role
        self.takes_prompts = True

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def leases(self) -> Iterable[Lease]:
        """All open leases."""
        return self._leases

    def leave(self, serves_holds: Callable[[], bool]) -> None:
        """Accepts no more prompts and refuses the prompts that the engine has not begun.

        The consumers of refused prompts use another worker. While `serves_holds` returns True,
        holds are still accepted: other workers take over this worker's sequences and must pull
        their blocks. After that, holds are refused, because requests for a popular prefix would
        prolong the drain.
        """
        self._draining = True
        self._serves_holds = serves_holds
        for lease in self._leases:
            if lease.stage == "queued" and not lease.is_hold:
                lease.events.put_nowait(Failed(lease.lease_id, NoWorkers.code, _DRAINS))

    def on_report(self, report: messages.Report) -> None:
        """Passes the results of a step to the leases."""
        self._tick = report.tick
        step = report.step
        self.on_final_blocks(step.final_blocks)
        for admitted in step.admitted:
            if (lease := self._leases.get(admitted.sequence_id)) is not None:
                lease.admitted_at = lease.admitted_at or admitted.at
                lease.shared_wait_s = admitted.shared_wait_s
                lease.tokens_ahead = admitted.tokens_ahead
        for reserved in step.reserved:
            lease = self._leases.get(reserved.sequence_id)
            if lease is not None and lease.plan is not None:
                lease.prefix = asyncio.create_task(self._fill(lease.plan, reserved))
                lease.prefix.add_done_callback(partial(_fail_if_broken, lease))
        events: list[Prefilled | Held | Failed] = [*step.prefilled, *step.held, *step.failed]
        for event in events:
            if (lease := self._leases.get(event.sequence_id)) is not None:
                if isinstance(event, Prefilled):
                    lease.prefilled_at = time.monotonic()
                lease.is_ahead = not isinstance(event, Failed)
                lease.events.put_nowait(event)

    def on_final_blocks(self, final_blocks: list[FinalBlocks]) -> None:
        for final in final_blocks:
            if (lease := self._leases.get(final.sequence_id)) is not None:
                lease.block_ids += final.block_ids
                lease.events.put_nowait(final)

    async def serve(
        self, commands: AsyncIterator[pb.PrefillCommand], context: Any
    ) -> AsyncIterator[pb.PrefillEvent]:
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                first = await anext(aiter(commands))
        except (StopAsyncIteration, TimeoutError):
            return  # the consumer has gone or sent no command
        holds = first.WhichOneof("command") == "hold"
        opening = first.hold if holds else first.start
        if not opening.lease_id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the first command must be `start` or `hold` with a lease id",
            )
        if opening.lease_id in self._leases:
            await context.abort(
                grpc.StatusCode.ALREADY_EXISTS, f"lease {opening.lease_id} is already open"
            )
        consumer_id = opening.consumer_worker_id
        if self._draining and not (holds and self._serves_holds()):
            yield _refused(_DRAINS)
            return
        if not holds and not self.takes_prompts:
            yield _refused("this worker has moved to the decode pool and prefills no prompts")
            return
        if why := self._leases.refusal(consumer_id):
            yield _refused(why, wait_estimate_s=self._rates.retry_after_s)
            return
        span = NO_SPAN
        if first.start.HasField("trace"):
            attributes = {
                "gen_ai.response.id": first.start.request_id,
                "tandem.decode_worker": consumer_id,
            }
            headers = trace_headers(first.start.trace)
            span = self._tracing.begin("prefill_worker", headers, attributes)
        lease = Lease(
            opening.lease_id,
            consumer_id,
            opening.transport,
            opening.verify_every,
            is_hold=holds,
            span=span,
        )
        self._leases.open(lease)
        outcome = "cancelled"
        reading = asyncio.create_task(self._read_commands(lease, commands))
        reading.add_done_callback(partial(_fail_if_broken, lease))
        try:
            self._link.send(self._begin(lease, first, self._transit(context.peer())))
            yield pb.PrefillEvent(accepted=pb.Accepted(epoch=self._epoch))
            async for event in self._events(lease):
                yield event
            outcome = "released"
        finally:
            reading.cancel()
            if lease.prefix is not None:
                lease.prefix.cancel()
            self._leases.close(lease)
            self._link.send(messages.Remove(lease.lease_id))
            now = time.monotonic()
            self._rates.on_end(now)
            self._metrics.requests.on_lease_end(lease, now)
            lease.end_span(now, outcome)
            log.debug("lease %s ended: %s", lease.lease_id, outcome, extra=about(lease.lease_id))

    def _transit(self, connection: str) -> Transit:
        """Returns the object that measures the delays of messages on a consumer's connection.

        Each connection has its own object, because hosts have different clocks.
        """
        if connection not in self._transits and len(self._transits) >= _TRANSITS_MAX:
            self._transits.clear()
        return self._transits.setdefault(connection, Transit())

    def _begin(self, lease: Lease, first: pb.PrefillCommand, transit: Transit) -> messages.Command:
        """Returns the command that adds a new lease's sequence or chain to the engine."""
        if first.WhichOneof("command") == "hold":
            hold = first.hold
            return messages.HoldPrefix(
                lease.lease_id,
                list(hold.block_hashes),
                hold.first_missing_block,
                min(hold.load_s_max, self._config.transfer.pull_deadline_s),
            )
        start = first.start
        spec = sequence_spec(
            start.input,
            sequence_id=lease.lease_id,
            mode=Mode.PREFILL_ONLY,
            first_wanted_block=start.first_missing_block,
            consumer_rate=(start.rate.latency_s, start.rate.bytes_per_s)
            if start.rate.bytes_per_s > 0  # an absent field has the rate 0
            else None,
            first_token_s=start.first_token_s,
            late_s=transit.late_s(start.sent_at_s),
        )
        if self._prefixes is not None:
            lease.plan = self._prefixes.plan(spec, start.prefix_holders)
        return messages.Add(lease.plan.spec if lease.plan is not None else spec)

    async def _fill(self, plan: PrefixPlan, reserved: Reserved) -> None:
        """Pulls the prefix of a lease's prompt, then makes the engine compute the rest.

        If the lease ends during the pull, the engine does not reuse the blocks until no read can
        write them any more.
        """
        assert self._prefixes is not None, "no plan without it"
        num_blocks = await self._prefixes.fill(plan, reserved)
        self._link.send(messages.ContinuePrefill(plan.spec.sequence_id, num_blocks))

    async def _events(self, lease: Lease) -> AsyncIterator[pb.PrefillEvent]:
        """Yields the events for the consumer until the end of the lease."""
        interval_s = self._config.transfer.heartbeat_interval_s
        is_answered = is_released = False
        while not (is_answered and is_released):
            try:
                async with asyncio.timeout(interval_s):
                    event = await lease.events.get()
            except TimeoutError:
                beat = pb.Heartbeat(step=self._tick, turn_s_max=self._rates.turn_s_max)
                yield pb.PrefillEvent(heartbeat=beat)
                continue
            match event:
                case FinalBlocks(_, first_block, block_ids):
                    run = pb.BlockRun(first_block=first_block, block_ids=block_ids)
                    if every := lease.verify_every:
                        pool = self._link.pool
                        run.checksums.extend(
                            await checksums(pool, lease.lease_id, first_block, block_ids, every)
                        )
                    yield pb.PrefillEvent(run=run)
                case Prefilled():
                    prefilled = pb.Prefilled(
                        first_token_id=event.first_token_id,
                        cached_tokens=event.num_cached_tokens,
                        queue_ms=lease.queue_s * 1000,
                        shared_wait_ms=lease.shared_wait_s * 1000,
                        tokens_ahead=lease.tokens_ahead,
                        prompt_logprobs=(
                            to_message(pb.LogprobEntry, one) for one in event.prompt_logprobs
                        ),
                        embedding=event.embedding,
                        block_sums=event.block_sums,
                    )
                    if self._config.engine.has_tiers:
                        prefilled.cached_by_tier.CopyFrom(to_message(pb.CachedTokens, event.cached))
                    if event.logprobs is not None:
                        prefilled.logprobs.CopyFrom(to_message(pb.LogprobEntry, event.logprobs))
                    yield pb.PrefillEvent(prefilled=prefilled)
                    is_answered = True
                case Held(_, num_blocks):
                    yield pb.PrefillEvent(held=pb.Held(num_blocks=num_blocks))
                    is_answered = True
                case Failed(_, code, message, wait_s):
                    if code == QueueFull.code:
                        wait_s = self._rates.retry_after_s
                    yield _refused(f"{code}: {message}", wait_estimate_s=wait_s, code=code)
                    return
                case pb.ReleaseLease():
                    is_released = True
        lease.is_ahead = False  # the consumer has read all blocks
        yield pb.PrefillEvent(
            released=pb.Released(epoch=self._epoch, lease_id=lease.lease_id, whole=True)
        )

    async def _read_commands(
        self, lease: Lease, commands: AsyncIterator[pb.PrefillCommand]
    ) -> None:
        try:
            async for command in commands:
                if command.WhichOneof("command") == "release":
                    lease.events.put_nowait(command.release)
                    return
        except BadRequest as error:
            lease.events.put_nowait(Failed(lease.lease_id, error.code, error.message))


def _fail_if_broken(lease: Lease, task: asyncio.Task[None]) -> None:
    """Ends the lease if one of its tasks has failed.

    Otherwise the consumer would wait until its own deadline.
    """
    if task.cancelled() or (error := task.exception()) is None:
        return
    log.error(
        "an unexpected error ended the prefill of lease %s",
        lease.lease_id,
        exc_info=error,
        extra=about(lease.lease_id),
    )
    message = f"the prefill failed: {error!r}"
    lease.events.put_nowait(Failed(lease.lease_id, InternalError.code, message))


def _refused(message: str, *, wait_estimate_s: float = 0.0, code: str = "") -> pb.PrefillEvent:
    """Returns a refusal. A retry may succeed after `wait_estimate_s` seconds; 0: a retry does not
    help.
    """
    refused = pb.Refused(message=message, wait_estimate_s=wait_estimate_s, code=code)
    return pb.PrefillEvent(refused=refused)
