"""The consumer's end of a `Prefill` stream. Every failure of the stream raises `LeaseLost`.

The stream fails if it is broken or closed, if no heartbeat arrives for some time, or if the
producer's engine makes no step for some time. Leaving the context of `open_stream` closes the
stream, and the producer frees the blocks of the lease.

The stream fails after ten missed heartbeats, because a slow network or a busy machine can delay
some. If the producer has also stopped writing its record in Redis, four are enough.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.errors import LeaseLost, ProducerSilent, TandemError
from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.channels import foreign_cancellation_raises
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.rates import hang_timeout_s

_SILENCES = 10  # missed heartbeats in a row after which the producer counts as gone
_SILENCES_CONFIRMED = 4  # replaces _SILENCES if the producer's record in Redis is overdue, too

# grpc.aio raises these errors after the producer has gone or the channel was closed. A write to a
# call that has ended raises InvalidStateError. A call on a closed channel raises UsageError.
_BROKEN_CALL = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError)
# With these details, the status UNAVAILABLE means that the connection timed out or was never
# established, and not that the other side closed it.
_NOT_CLOSED = re.compile("timed out|timeout|failed to connect", re.IGNORECASE)


@asynccontextmanager
async def open_stream(
    peer: Peer,
    config: WorkerConfig,
    opening: pb.PrefillCommand,
    is_silent: Callable[[], bool],
) -> AsyncIterator[LeaseStream]:
    """Opens a lease's stream with the message `opening`.

    `is_silent` returns whether the producer's record in Redis is overdue. Raises LeaseLost, or the
    TandemError that was raised inside the `async with` statement.
    """
    call = peer.stub.Prefill(metadata=token_metadata(config.cluster.token))
    closed = LeaseLost(f"the connection to {peer.worker_id} was closed")
    stream = LeaseStream(peer, config.transfer, call)
    watching = asyncio.create_task(stream.watch(is_silent))
    try:
        with foreign_cancellation_raises(closed):
            await stream.write(opening)
            yield stream
    except BaseExceptionGroup as group:
        raise _first_error(group) from group
    except _BROKEN_CALL as error:
        raise LeaseLost(f"the stream to {peer.worker_id} failed: {_describe(error)}") from error
    finally:
        watching.cancel()
        call.cancel()


class LeaseStream:
    """The consumer's side of a lease's stream.

    `engine_waited_for` is True while the producer's engine has work for the lease.
    """

    def __init__(self, peer: Peer, config: TransferConfig, call: Any) -> None:
        self._peer = peer
        self._config = config
        self._call = call
        self._step = -1
        self._moved_at = self._heard_at = self._now()
        self._reading: asyncio.Timeout | None = None
        self.engine_waited_for = True

    async def write(self, command: pb.PrefillCommand) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                await self._call.write(command)
        except TimeoutError:
            raise ProducerSilent(
                f"{self._peer.worker_id} has stopped reading the messages of the lease"
            ) from None

    async def read(self) -> pb.PrefillEvent:
        """Returns the next event other than a heartbeat."""
        while True:
            event = await self._read()
            if event.WhichOneof("event") != "heartbeat":
                self._moved_at = self._now()
                return event
            self._check_engine(event.heartbeat)

    async def watch(self, is_silent: Callable[[], bool]) -> None:
        """Makes `read` fail after `_SILENCES_CONFIRMED` missed heartbeats if the producer is also
        late in writing its record. Runs until it is cancelled.
        """
        interval_s = self._config.heartbeat_interval_s
        while True:
            await asyncio.sleep(interval_s)
            reading = self._reading
            if reading is None or reading.expired():
                continue
            silent_s = self._now() - self._heard_at
            if silent_s >= _SILENCES_CONFIRMED * interval_s and is_silent():
                reading.reschedule(self._now())

    def _check_engine(self, heartbeat: pb.Heartbeat) -> None:
        if heartbeat.step != self._step or not self.engine_waited_for:
            self._step = heartbeat.step
            self._moved_at = self._now()
            return
        limit_s = hang_timeout_s(heartbeat.turn_s_max, self._config.heartbeat_timeout_s)
        if self._now() - self._moved_at > limit_s:
            raise ProducerSilent(f"the engine of {self._peer.worker_id} hangs")

    async def _read(self) -> pb.PrefillEvent:
        self._heard_at = self._now()
        try:
            # In Python 3.11, asyncio.wait_for could swallow a cancellation.
            async with asyncio.timeout(self._silence_s) as self._reading:
                event: pb.PrefillEvent = await self._call.read()
        except TimeoutError:
            silence = f"was silent for {self._now() - self._heard_at:.1f} s"
            raise ProducerSilent(f"{self._peer.worker_id} {silence}") from None
        finally:
            self._reading = None
        if event is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise LeaseLost(f"{self._peer.worker_id} closed the stream")
        return event

    @property
    def _silence_s(self) -> float:
        return self._config.heartbeat_interval_s * _SILENCES

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def is_producer_gone(error: BaseException | None) -> bool:
    """Returns whether a lease was lost because the producer's process ended during the lease.

    In that case the request itself may have crashed the process. The sign is a closed connection,
    because the operating system closes the connections of a process that ends. A timeout only
    means that the network is cut or the process is stopped. A failed connect means that the process
    had ended before the lease.
    """
    causes = [error]
    seen = set[int]()
    while causes:
        cause = causes.pop()
        if cause is None or id(cause) in seen:
            # This error was visited before: an error can be raised from an exception group that
            # contains the same error.
            continue
        seen.add(id(cause))
        if isinstance(cause, grpc.aio.AioRpcError):
            is_closed = not _NOT_CLOSED.search(cause.details() or "")
            if cause.code() is grpc.StatusCode.UNAVAILABLE and is_closed:
                return True
        elif isinstance(cause, BaseExceptionGroup):
            causes += cause.exceptions
        elif isinstance(cause, LeaseLost):
            causes.append(cause.__cause__)
    return False


def _first_error(group: BaseExceptionGroup) -> BaseException:
    """Returns the error to report for an exception group.

    A TandemError is preferred, because it may have caused the group's other errors.
    """
    errors = [e for e in group.exceptions if not isinstance(e, BaseExceptionGroup)]
    ours = [e for e in errors if isinstance(e, TandemError)]
    if ours:
        return ours[0]
    if broken := [e for e in errors if isinstance(e, _BROKEN_CALL)]:
        return LeaseLost(f"a pull failed: {_describe(broken[0])}")
    return errors[0] if errors else group


def _describe(error: BaseException) -> str:
    return error.code().name if isinstance(error, grpc.aio.AioRpcError) else repr(error)
