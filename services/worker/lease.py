"""The reader's side of one lease: a `Prefill` stream, and the pulls that it protects.

    open --> reading events, each run pulled at once --> prefilled, last pulls --> release --> done
      `-----------------------`---------------------------`------> LeaseLost (stream closed)

The stream is the lease: leaving `run` in any way closes it, and the source frees its blocks. Until
`run` returns, nothing that was pulled may be trusted; it returns only after `released` of the same
epoch and lease came back whole.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from services.config import TransferConfig
from services.engine.types import SequenceSpec
from services.errors import LeaseLost, TandemError, WorkerLost
from services.rpc.auth import token_metadata
from services.rpc.tandem.v1 import worker_pb2 as pb
from services.worker.convert import sequence_input
from services.worker.engine_link import EngineLink
from services.worker.peers import Peer
from services.worker.pulls import Puller

_SILENCES = 10  # heartbeats that may be missed in a row before the source counts as gone


# What grpc.aio raises when the other side or the channel is gone; a write to a call that has ended
# is an InvalidStateError, a call on a closed channel a UsageError.
_BROKEN_CALL = (
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    TimeoutError,
)


@dataclass(slots=True)
class PullStats:
    """What one lease moved, and when."""

    num_blocks: int = 0
    num_bytes: int = 0
    prefilled_at: float = 0.0  # time.monotonic() when the first token came; 0: it did not
    released_at: float = 0.0
    cached_tokens: int = 0  # of the prompt, at the source


class ReaderLease:
    """One attempt to have a prompt prefilled by `peer` and its missing blocks pulled."""

    def __init__(
        self,
        *,
        peer: Peer,
        link: EngineLink,
        config: TransferConfig,
        token: str,
        reader_id: str,
        block_size: int,
        block_bytes: int,
    ) -> None:
        self.peer = peer
        self._puller = Puller(config, link, token=token, block_bytes=block_bytes)
        self._config = config
        self._token = token
        self._reader_id = reader_id
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._lease_id = uuid.uuid4().hex
        self._epoch = ""
        self._next_block = 0
        self._end_block = 0
        self.stats = PullStats()
        self.pulled_anything = False

    @property
    def _silence_s(self) -> float:
        return self._config.heartbeat_interval_s * _SILENCES

    async def run(
        self,
        spec: SequenceSpec,
        *,
        request_id: str,
        first_missing_block: int,
        on_first_token: Callable[[int, PullStats], None],
    ) -> int:
        """Pulls every missing block and returns the first token. Raises TandemError."""
        self._next_block = first_missing_block
        self._end_block = -(-len(spec.token_ids) // self._block_size)
        num_missing = self._end_block - first_missing_block
        call = self.peer.stub.Prefill(metadata=token_metadata(self._token))
        try:
            start = pb.StartPrefill(
                lease_id=self._lease_id,
                request_id=request_id,
                input=sequence_input(spec),
                first_missing_block=first_missing_block,
                reader_worker_id=self._reader_id,
                transport=self.peer.transport,
            )
            async with asyncio.timeout(self._silence_s):
                await call.write(pb.PrefillCommand(start=start))
            async with asyncio.TaskGroup() as pulls:
                first_token_id = await self._follow(call, pulls, spec.sequence_id)
                on_first_token(first_token_id, self.stats)
            # Counted by pulls that ended well, so a task that vanished is missed here, too.
            if self.stats.num_blocks != num_missing:
                moved = f"{self.stats.num_blocks} of {num_missing} blocks"
                raise LeaseLost(f"{self.peer.worker_id} sent {moved}")
            await self._release(call)
            return first_token_id
        except BaseExceptionGroup as group:
            raise _first_error(group) from group
        except _BROKEN_CALL as error:
            raise LeaseLost(f"{self.peer.worker_id}: {_describe(error)}") from error
        except asyncio.CancelledError:
            # A channel that is closed under a call cancels it; that is not our cancellation.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise LeaseLost(f"the connection to {self.peer.worker_id} was closed") from None
        finally:
            call.cancel()

    async def _follow(self, call: Any, pulls: asyncio.TaskGroup, sequence_id: str) -> int:
        """Reads events until the first token, and starts a pull for each run."""
        last_step, moved_at = -1, time.monotonic()
        while True:
            event = await self._read(call)
            match event.WhichOneof("event"):
                case "accepted":
                    self._epoch = event.accepted.epoch
                case "refused":
                    raise WorkerLost(f"{self.peer.worker_id} refused: {event.refused.message}")
                case "run":
                    pulls.create_task(self._pull(sequence_id, event.run))
                    moved_at = time.monotonic()
                case "prefilled":
                    self.stats.prefilled_at = time.monotonic()
                    self.stats.cached_tokens = event.prefilled.cached_tokens
                    return int(event.prefilled.first_token_id)
                case "heartbeat":
                    if event.heartbeat.step != last_step:
                        last_step, moved_at = event.heartbeat.step, time.monotonic()
                    elif time.monotonic() - moved_at > self._config.heartbeat_timeout_s:
                        raise LeaseLost(f"the engine of {self.peer.worker_id} hangs")

    async def _pull(self, sequence_id: str, run: pb.BlockRun) -> None:
        if run.first_block != self._next_block:
            raise LeaseLost(f"a run starts at block {run.first_block}, not {self._next_block}")
        self._next_block += len(run.block_ids)
        if self._next_block > self._end_block:
            raise LeaseLost(f"a run ends at block {self._next_block}, after {self._end_block}")
        self.pulled_anything = True
        await self._puller.pull(
            self.peer, lease_id=self._lease_id, sequence_id=sequence_id, run=run
        )
        self.stats.num_blocks += len(run.block_ids)
        self.stats.num_bytes += len(run.block_ids) * self._block_bytes

    async def _release(self, call: Any) -> None:
        """Says that the reads are done; only the answer makes what was pulled good."""
        await call.write(pb.PrefillCommand(release=pb.ReleaseLease()))
        async with asyncio.timeout(self._config.release_deadline_s):
            while True:
                event = await self._read(call)
                if event.WhichOneof("event") == "released":
                    break
        released = event.released
        same = released.epoch == self._epoch and released.lease_id == self._lease_id
        if not (same and released.whole):
            raise LeaseLost(f"{self.peer.worker_id} did not hold the lease to its end")
        self.stats.released_at = time.monotonic()

    async def _read(self, call: Any) -> pb.PrefillEvent:
        """The next event. A source that is silent for longer than its heartbeats allow is gone."""
        try:
            # Not wait_for: in Python 3.11 it can swallow a cancellation.
            async with asyncio.timeout(self._silence_s):
                event: pb.PrefillEvent = await call.read()
        except TimeoutError:
            raise LeaseLost(f"{self.peer.worker_id} was silent for {self._silence_s} s") from None
        if event is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise LeaseLost(f"{self.peer.worker_id} closed the stream")
        return event


def _first_error(group: BaseExceptionGroup) -> BaseException:
    """What to report of a group: our own errors before what they caused."""
    errors = [e for e in group.exceptions if not isinstance(e, BaseExceptionGroup)]
    ours = [e for e in errors if isinstance(e, TandemError)]
    if ours:
        return ours[0]
    if broken := [e for e in errors if isinstance(e, _BROKEN_CALL)]:
        return LeaseLost(f"a pull failed: {_describe(broken[0])}")
    return errors[0] if errors else group


def _describe(error: BaseException) -> str:
    return error.code().name if isinstance(error, grpc.aio.AioRpcError) else repr(error)
