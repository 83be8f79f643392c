"""A worker that implements the real Decode protocol and sends what a test's script contains."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from redis.asyncio import Redis

from tandem.common.config.cluster import ClusterConfig
from tandem.common.perf_model.rates import PairRate, WorkerRates
from tandem.common.process.cancellation import cancel
from tandem.common.worker_load import WorkerLoad
from tandem.net.observability.log_file import NO_FILE, LogPosition, read_piece
from tandem.net.rpc.auth import TokenInterceptor
from tandem.net.rpc.options import SERVER_OPTIONS
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.net.store.client import UNREACHABLE
from tandem.net.store.registry import (
    ENCODE_GENERATION,
    KvCompatibility,
    Registry,
    State,
    WorkerRecord,
    generation_of,
)
from tandem.prefix_index.entries import ENTRY_BYTES, bucket_start

RECORD_INTERVAL_S = 0.3
Say = Callable[[pb.SequenceUpdate], None]
Script = Callable[[pb.SubmitSequence, Say], Awaitable[None]]
Message = pb.DecodeUpdate | Exception | None  # None ends the stream


def compatibility(fingerprint: str) -> KvCompatibility:
    return KvCompatibility(
        model_fingerprint=fingerprint,
        compute_dtype="float32",
        numerics="invariant",
        block_size=16,
        kv_dtype="float32",
        layout="test",
        hash_version=1,
    )


def update(
    submit: pb.SubmitSequence, token_ids: list[int], finish_reason: str = "", **more: Any
) -> pb.SequenceUpdate:
    return pb.SequenceUpdate(
        request_id=submit.request_id,
        attempt=submit.attempt,
        token_ids=token_ids,
        finish_reason=finish_reason,
        **more,
    )


def refusal(submit: pb.SubmitSequence, code: str, retry_after_s: float = 0) -> pb.SequenceUpdate:
    error = pb.WorkerError(code=code, message=f"says the test: {code}", retry_after_s=retry_after_s)
    return update(submit, [], "error", error=error)


def saying(
    token_ids: list[int],
    *,
    finish_reason: str = "length",
    cached_tokens: int = 0,
    cached_by_tier: pb.CachedTokens | None = None,
) -> Script:
    """Builds a script that sends these tokens, one in each update, up to max_tokens, and then
    `finish_reason`."""
    first = {"cached_tokens": cached_tokens, "cached_by_tier": cached_by_tier}

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        ids = token_ids[: submit.input.max_tokens]
        for index, token_id in enumerate(ids):
            last = index == len(ids) - 1
            reason = "length" if len(ids) == submit.input.max_tokens else finish_reason
            more = first if index == 0 else {}
            say(update(submit, [token_id], reason if last else "", **more))
            await asyncio.sleep(0)

    return script


def refusing(code: str, retry_after_s: float = 0) -> Script:
    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        say(refusal(submit, code, retry_after_s))

    return script


async def silent(submit: pb.SubmitSequence, say: Say) -> None:
    """Sends nothing."""


class ScriptedWorker(WorkerServicer):
    """Answers each submission by `script`, and records submissions and cancellations for the
    test."""

    def __init__(
        self,
        redis: Redis,
        cluster: ClusterConfig,
        *,
        fingerprint: str,
        worker_id: str = "decode-0",
        role: str = "decode",
        group: str = "",
        script: Script = silent,
        rates: WorkerRates = WorkerRates(),
    ) -> None:
        self.script = script
        self.state: State = "ready"
        self.draining = False
        self.load = WorkerLoad(queue_max=8, blocks_total=1000)
        self.rates = rates
        self.pairs: dict[str, PairRate] = {}
        self.max_model_len = 2048
        # block hashes that it reports; None: it cannot list them
        self.block_hashes: list[bytes] | None = None
        self.submitted: list[pb.SubmitSequence] = []
        self.cancelled: list[str] = []
        self.asked_back: list[int] = []  # waiting sequences that a router asked to be returned
        self.drains: list[float] = []  # requested drain deadlines
        self.kept: list[pb.KeepRequest] = []
        # reason that it reports for keeping nothing; empty: it keeps everything
        self.keep_reason = ""
        # blocks cached until a reset; None: it does not implement the call
        self.cached_blocks: int | None = 0
        self.log: Path | None = None  # path of its log; None: it has no log file
        self.address = ""
        self.worker_id = worker_id
        self.role = self.pool = role
        self.group = group
        self._registry = Registry(redis, cluster)
        self._token = cluster.token
        is_encoder = role == "encode"
        make_compatibility = KvCompatibility.of_encode_worker if is_encoder else compatibility
        self._compatibility = make_compatibility(fingerprint)
        self._generation = generation_of(group, ENCODE_GENERATION if is_encoder else "")
        self._epoch = uuid.uuid4().hex
        self._started_at = time.time()
        self._server: grpc.aio.Server | None = None
        self._recording: asyncio.Task[None] | None = None
        self._streams: dict[asyncio.Queue[Message], set[asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Queue[Message]] = set()

    async def start(self) -> ScriptedWorker:
        self._server = grpc.aio.server(
            interceptors=[TokenInterceptor(self._token)], options=SERVER_OPTIONS
        )
        add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        await self.write_record()
        self._recording = asyncio.create_task(self._keep_record())
        return self

    async def stop(self) -> None:
        if self._recording is not None:
            await cancel(self._recording)
        await self._registry.remove(self.worker_id)
        if self._server is not None:
            await self._server.stop(0)

    async def keep_no_record(self) -> None:
        """Stops renewing the worker's record, as for a process that is stopped or cut off."""
        assert self._recording is not None
        await cancel(self._recording)

    @property
    def has_stream(self) -> bool:
        """Says whether a router has a stream that is not about to end."""
        return any(queue not in self._ending for queue in self._streams)

    def break_streams(self) -> None:
        """Ends every router's stream with an error, as if the worker had died. Routers may
        reconnect."""
        self._end_streams(ConnectionError("the worker dies, says the test"))

    def drain(self) -> None:
        """Reports to every router that the worker drains; running sequences continue."""
        self.draining = True
        for queue in self._streams:
            queue.put_nowait(pb.DecodeUpdate(draining=True))

    def stay(self) -> None:
        """Reverts `drain`, like a worker that was moved back to the pool."""
        self.draining = False
        for queue in self._streams:
            queue.put_nowait(pb.DecodeUpdate(draining=False))

    def leave(self) -> None:
        """Ends the streams in order. A router that reconnects finds the worker as at the start."""
        self.draining = False
        self._end_streams(None)

    def tell_load(self, num_submits: int) -> None:
        """Sends `load` on every stream, as of `num_submits` submissions of the stream."""
        values = {name: getattr(self.load, name) for name in self.load.__struct_fields__}
        message = pb.DecodeUpdate(load=pb.WorkerLoad(**values), num_submits=num_submits)
        for queue in self._streams:
            queue.put_nowait(message)

    async def write_record(self) -> None:
        await self._registry.write(
            WorkerRecord(
                worker_id=self.worker_id,
                epoch=self._epoch,
                role=self.role,
                pool=self.pool,
                generation=self._generation,
                group=self.group,
                state=self.state,
                address=self.address,
                metrics_address="",
                host="here",
                pid=1,
                model="scripted",
                max_model_len=self.max_model_len,
                compatibility=self._compatibility,
                load=self.load,
                rates=self.rates,
                pairs=self.pairs,
                started_at=self._started_at,
            )
        )

    async def Decode(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.DecodeCommand], context: Any
    ) -> AsyncIterator[pb.DecodeUpdate]:
        queue: asyncio.Queue[Message] = asyncio.Queue()
        tasks = self._streams[queue] = set()
        reading = asyncio.create_task(self._read(request_iterator, queue, tasks))
        try:
            while (message := await queue.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            del self._streams[queue]
            self._ending.discard(queue)
            for task in (reading, *tasks):
                task.cancel()

    async def SetRole(  # noqa: N802
        self, request: pb.SetRoleRequest, context: Any
    ) -> pb.SetRoleResponse:
        if self.state != "ready":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"it is {self.state}")
        self.role = request.role
        await self.write_record()
        return pb.SetRoleResponse(role=self.role, took_s=0.25)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:  # noqa: N802
        self.drains.append(request.deadline_s)
        return pb.DrainResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.ResetPrefixCacheResponse:
        if (dropped := self.cached_blocks) is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "says the test")
        self.cached_blocks = 0
        return pb.ResetPrefixCacheResponse(num_blocks=dropped)

    async def ReadLog(  # noqa: N802
        self, request: pb.ReadLogRequest, context: Any
    ) -> pb.ReadLogResponse:
        if self.log is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, NO_FILE)
        text, after = read_piece(self.log, LogPosition.parse(request.after))
        return pb.ReadLogResponse(text=text, after=str(after))

    async def Keep(self, request: pb.KeepRequest, context: Any) -> pb.KeepResponse:  # noqa: N802
        self.kept.append(request)
        num_blocks = 0 if self.keep_reason else len(request.block_hashes)
        return pb.KeepResponse(num_blocks=num_blocks, reason=self.keep_reason)

    async def ListBlocks(  # noqa: N802
        self, request: pb.ListBlocksRequest, context: Any
    ) -> pb.ListBlocksResponse:
        if self.block_hashes is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "says the test")
        low, high = (bucket_start(b) for b in (request.first_bucket, request.end_bucket))
        found = [h[:ENTRY_BYTES] for h in self.block_hashes if low <= h and (not high or h < high)]
        return pb.ListBlocksResponse(hashes=b"".join(found))

    def _end_streams(self, last: Message) -> None:
        for queue in self._streams:
            self._ending.add(queue)
            queue.put_nowait(last)

    async def _read(
        self,
        commands: AsyncIterator[pb.DecodeCommand],
        queue: asyncio.Queue[Message],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        def say(update: pb.SequenceUpdate) -> None:
            queue.put_nowait(pb.DecodeUpdate(sequences=[update], draining=self.draining))

        async for command in commands:
            if command.HasField("submit"):
                self.submitted.append(command.submit)
                task = asyncio.ensure_future(self.script(command.submit, say))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            elif command.HasField("return_waiting"):
                self.asked_back.append(command.return_waiting.count)
            else:
                self.cancelled.append(command.cancel.request_id)

    async def _keep_record(self) -> None:
        while True:
            await asyncio.sleep(RECORD_INTERVAL_S)
            with suppress(*UNREACHABLE):
                await self.write_record()
