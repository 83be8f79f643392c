"""Keeps the gRPC stream `Decode` to one worker, which all requests on the worker share.

States of the stream:
    down -> connecting -> up --the stream breaks--> down: all attempts fail with WorkerLost
                          up --the worker drains--> draining: the attempts continue
                    draining --the stream ends----> down: unfinished attempts fail with WorkerLeft
From `down`, the client connects again. An `Attempt` is one submission of a request to this worker
(attempt.py). The queue of commands has at most one submit and one cancel for each live request.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from tandem.common.backoff import Backoff, doubling_at_random
from tandem.common.perf_model.predict import Prefill
from tandem.common.worker_load import WorkerLoad
from tandem.errors import WorkerLeft, WorkerLost
from tandem.net.rpc.convert import to_struct
from tandem.net.rpc.peer_calls import PeerCalls
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1 import worker_pb2_grpc as pb_grpc
from tandem.router.workers.attempt import Attempt

log = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 5.0
BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 2.0
CLOSE_DEADLINE_S = 2.0
KEEP_DEADLINE_S = 10.0


class WorkerClient:
    """Keeps one stream to a decode worker; reconnects with a bounded back-off until `close`."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        calls: PeerCalls,
        *,
        on_change: Callable[[], None],
        on_load: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when the stream goes up or down, and when the worker drains.

        `on_load` is called when the worker reports its load, and when a request is submitted.
        """
        self.worker_id = worker_id
        self.address = address
        self.is_up = False
        self.is_draining = False
        self.why_down = ""  # why the last stream ended or could not be opened; "": none has failed
        self.load: WorkerLoad | None = None
        # Prefill work of the submissions that are not part of the worker's last reported load yet.
        # With each load, the worker reports how many submissions the load includes.
        self.unreported: deque[Prefill] = deque()
        self._num_reported = 0
        self._calls = calls
        self._on_change = on_change
        self._on_load = on_load
        self._attempts: dict[str, Attempt] = {}
        self._commands: deque[pb.DecodeCommand] = deque()
        self._command_waits = asyncio.Event()
        self._stub: pb_grpc.WorkerStub | None = None  # None: the stream is down
        self._heard_at = 0.0  # monotonic seconds of the last message from the worker
        self._task = asyncio.create_task(self._run(), name=f"decode-stream-{worker_id}")

    @property
    def num_inflight(self) -> int:
        return len(self._attempts)

    def submit(self, message: pb.SubmitSequence, *, prefill: Prefill) -> Attempt:
        """Submits a sequence. `prefill` is the prefill work that the decode worker itself will do.

        Raises WorkerLost at once if the stream is down.
        """
        if not self.is_up:
            raise WorkerLost(f"worker {self.worker_id} is not connected")
        num_output_tokens = len(message.input.token_ids) - message.input.num_prompt_tokens
        tokens_left = message.input.max_tokens - num_output_tokens
        request_id = message.request_id

        def on_close(attempt: Attempt) -> None:
            if self._attempts.get(request_id) is attempt:
                del self._attempts[request_id]
                if self.is_up and not attempt.is_over:
                    cancel = pb.CancelSequence(request_id=request_id)
                    self._send(pb.DecodeCommand(cancel=cancel))

        attempt = Attempt(self.worker_id, message.attempt, tokens_left, on_close)
        self._attempts[request_id] = attempt
        self.unreported.append(prefill)
        self._send(pb.DecodeCommand(submit=message))
        self._on_load()
        return attempt

    def return_waiting(self, count: int) -> None:
        """Makes the worker return up to `count` waiting sequences.

        The attempts of the returned sequences fail with the error Returned. The dispatcher then
        places these sequences again.
        """
        if self.is_up:
            returned = pb.ReturnWaiting(count=count)
            self._send(pb.DecodeCommand(return_waiting=returned))

    async def keep(self, message: pb.KeepRequest) -> pb.KeepResponse:
        """Makes the worker pin the blocks of a prefix, so that they are not evicted.

        Raises WorkerLost if the stream is down, and AioRpcError if the call fails.
        """
        if self._stub is None:
            raise WorkerLost(f"worker {self.worker_id} is not connected")
        call = self._stub.Keep(message, timeout=KEEP_DEADLINE_S, metadata=self._calls.metadata)
        answer: pb.KeepResponse = await call
        return answer

    def give_up_if_silent(self, limit_s: float) -> None:
        """Closes the stream if the worker has sent nothing for more than `limit_s` seconds.

        Without this, gRPC's pings need 20 s to detect a worker that is stopped or cut off.
        """
        silent_s = time.monotonic() - self._heard_at
        if self.is_up and silent_s > limit_s:
            self._go_down(f"it sent nothing for {silent_s:.0f} s")
            self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_DEADLINE_S)

    def _send(self, command: pb.DecodeCommand) -> None:
        self._commands.append(command)
        self._command_waits.set()

    async def _run(self) -> None:
        backoff = Backoff(doubling_at_random(BACKOFF_MIN_S, BACKOFF_MAX_S))
        while True:
            try:
                async with self._calls.open(self.address) as channel:
                    async with asyncio.timeout(CONNECT_DEADLINE_S):
                        await channel.channel_ready()
                    backoff.reset()
                    await self._serve(pb_grpc.WorkerStub(channel))  # type: ignore[no-untyped-call]
                reason = "the worker ended the stream"
            except TimeoutError:
                reason = f"no connection within {CONNECT_DEADLINE_S:g} s"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except Exception as error:
                log.exception(
                    "the stream to worker %s failed because of an error in this router",
                    self.worker_id,
                )
                reason = repr(error)
            finally:
                self._go_down("this router is shutting down")
            self.why_down = reason
            log.warning(
                "worker %s at %s is not connected (%s); the router tries again",
                self.worker_id,
                self.address,
                reason,
            )
            await asyncio.sleep(backoff.next_s())

    async def _serve(self, stub: pb_grpc.WorkerStub) -> None:
        call = stub.Decode(metadata=self._calls.metadata)
        self._commands.clear()
        writer = asyncio.create_task(self._write(call))
        self.is_up = True
        self._stub = stub
        self._heard_at = time.monotonic()
        log.info("worker %s at %s is connected", self.worker_id, self.address)
        self._on_change()
        try:
            async for update in call:
                self._take(update)
            if self.is_draining:
                self._go_down("it ended after its drain", WorkerLeft)
        finally:
            # Mark the stream as down first, so that no request is submitted during the clean-up.
            self._go_down("the connection to it failed")
            writer.cancel()
            call.cancel()
            await asyncio.wait([writer], timeout=CLOSE_DEADLINE_S)

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        try:
            while True:
                while self._commands:
                    await call.write(self._commands.popleft())
                self._command_waits.clear()
                await self._command_waits.wait()
        except Exception as error:
            # `_serve` reads from the same call, so it also gets an error, and cleans up.
            log.debug("writing to worker %s failed: %r", self.worker_id, error)
            call.cancel()

    def _take(self, update: pb.DecodeUpdate) -> None:
        self._heard_at = time.monotonic()
        if update.HasField("load"):
            self.load = to_struct(WorkerLoad, update.load)
            while self._num_reported < update.num_submits and self.unreported:
                self.unreported.popleft()
                self._num_reported += 1
            self._on_load()
        for sequence in update.sequences:
            attempt = self._attempts.get(sequence.request_id)
            if attempt is not None:
                attempt.take(sequence)
        if update.draining != self.is_draining:
            self.is_draining = update.draining
            self._on_change()
            for attempt in self._attempts.values():
                attempt.note_draining(update.draining)

    def _go_down(self, reason: str, kind: type[WorkerLost] = WorkerLost) -> None:
        was_up = self.is_up
        self.is_up = False
        self.is_draining = False
        self._stub = None
        self.unreported.clear()
        self._num_reported = 0
        for attempt in self._attempts.values():
            attempt.fail(kind(f"decode worker {self.worker_id} was lost: {reason}"))
        self._attempts.clear()
        if was_up:
            self._on_change()
