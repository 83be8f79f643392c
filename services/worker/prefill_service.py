"""The source's side of a lease: `Prefill` streams, and bytes for readers without NIXL.

    start --> (refused)
          `-> leased: computing --> prefilled --> released
                  `-------------------`--> stream closed

Whatever way the stream ends, its `finally` removes the sequence from the engine, which frees the
blocks: nothing outlives the stream. The reader promises in `release` that its reads are done; the
answer `released` says that every block was held until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.config import WorkerConfig
from services.engine.types import Failed, FinalBlocks, Mode, Prefilled
from services.rpc.tandem.v1 import worker_pb2 as pb
from services.worker.convert import sequence_spec
from services.worker.engine_link import EngineLink
from services.worker.messages import Add, Remove, Report
from services.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

_FETCH_BYTES_MAX = 2 << 20  # of one message of block bytes: small enough to stay in the caches
_START_DEADLINE_S = 5.0


@dataclass(slots=True)
class Lease:
    """One reader's hold on the blocks of one sequence."""

    lease_id: str
    # At most one event for each block of the prompt, and one release.
    events: asyncio.Queue[object] = field(default_factory=asyncio.Queue)


class PrefillService:
    """All leases of this worker as a source."""

    def __init__(
        self,
        config: WorkerConfig,
        epoch: str,
        link: EngineLink,
        metrics: WorkerMetrics,
        *,
        block_bytes: int,
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._link = link
        self._metrics = metrics
        self._block_bytes = block_bytes
        self._leases: dict[str, Lease] = {}
        self._tick = 0
        self.draining = False

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def on_report(self, report: Report) -> None:
        """Hands each lease what a step brought for it."""
        self._tick = report.tick
        step = report.report
        events: list[FinalBlocks | Prefilled | Failed]
        events = [*step.final_blocks, *step.prefilled, *step.failed]
        for event in events:
            if (lease := self._leases.get(event.sequence_id)) is not None:
                lease.events.put_nowait(event)

    async def serve(
        self, commands: AsyncIterator[pb.PrefillCommand], context: Any
    ) -> AsyncIterator[pb.PrefillEvent]:
        first = await asyncio.wait_for(anext(aiter(commands)), _START_DEADLINE_S)
        start = first.start
        if first.WhichOneof("command") != "start" or not start.lease_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first command is `start`")
        if start.lease_id in self._leases:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"lease {start.lease_id} is open")
        if self.draining:
            yield _refused("this worker is draining")
            return
        lease = Lease(start.lease_id)
        self._leases[lease.lease_id] = lease
        reading = asyncio.create_task(self._read_commands(lease, commands))
        spec = sequence_spec(
            start.input,
            sequence_id=lease.lease_id,
            mode=Mode.FOR_PEER,
            first_wanted_block=start.first_missing_block,
        )
        try:
            self._link.send(Add(spec))
            yield pb.PrefillEvent(accepted=pb.Accepted(epoch=self._epoch))
            async for event in self._events(lease):
                yield event
        finally:
            reading.cancel()
            del self._leases[lease.lease_id]
            self._link.send(Remove(lease.lease_id))

    async def _events(self, lease: Lease) -> AsyncIterator[pb.PrefillEvent]:
        interval_s = self._config.transfer.heartbeat_interval_s
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    event = await lease.events.get()
            except TimeoutError:
                yield pb.PrefillEvent(heartbeat=pb.Heartbeat(step=self._tick))
                continue
            match event:
                case FinalBlocks(_, first_block, block_ids):
                    run = pb.BlockRun(first_block=first_block, block_ids=block_ids)
                    yield pb.PrefillEvent(run=run)
                case Prefilled():
                    prefilled = pb.Prefilled(
                        first_token_id=event.first_token_id, cached_tokens=event.num_cached_tokens
                    )
                    yield pb.PrefillEvent(prefilled=prefilled)
                case Failed(_, code, message):
                    yield _refused(f"{code}: {message}")
                    return
                case pb.ReleaseLease():
                    yield pb.PrefillEvent(
                        released=pb.Released(epoch=self._epoch, lease_id=lease.lease_id, whole=True)
                    )
                    return

    async def _read_commands(
        self, lease: Lease, commands: AsyncIterator[pb.PrefillCommand]
    ) -> None:
        async for command in commands:
            if command.WhichOneof("command") == "release":
                lease.events.put_nowait(command.release)
                return

    async def fetch(
        self, request: pb.FetchBlocksRequest, context: Any
    ) -> AsyncIterator[pb.BlockBytes]:
        """Bytes of leased blocks, in the order asked for, whole blocks a message."""
        if request.lease_id not in self._leases:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no lease {request.lease_id} is open")
        blocks_a_message = max(1, _FETCH_BYTES_MAX // self._block_bytes)
        for first in range(0, len(request.block_ids), blocks_a_message):
            block_ids = list(request.block_ids[first : first + blocks_a_message])
            data = await self._link.load_bytes(request.lease_id, block_ids)
            self._metrics.kv_bytes_served.inc(len(data))
            yield pb.BlockBytes(data=bytes(data))


def _refused(message: str) -> pb.PrefillEvent:
    return pb.PrefillEvent(refused=pb.Refused(message=message))
