"""Requests embeddings of images from encode workers, for the engine of a worker with KV.

    engine --ImageWanted--> here --Encode (gRPC)--> encode worker
    engine <--ImageEncoded-- here <--rows in pieces-- encode worker

The worker that computes a prompt sends the requests, because only it knows whether its KV cache
lacks an image. Each request is answered: if no encode worker sends the embedding in time, the
answer is an error, and the engine computes the embedding itself. So an encode worker that is slow,
lost or wrong delays a request, but never fails it.

An embedding is used only if the encode worker has the same checkpoint, and the embedding has the
image's digest, the type and the shape that the prompt needs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import grpc
import grpc.aio

from tandem.common.config.worker import WorkerConfig
from tandem.errors import Incompatible, TandemError, WorkerLost
from tandem.net.rpc.channels import close_soon
from tandem.net.rpc.peer_calls import PeerCalls
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.net.store.registry import WorkerRecord
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.link import EngineLink

log = logging.getLogger(__name__)

DTYPE = "float32"  # of embeddings
ROW_BYTES = 4  # of each number of a row
Outcome = Literal["encoded", "busy", "late", "lost", "wrong"]
_OUTCOMES: dict[grpc.StatusCode, Outcome] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "busy",
    grpc.StatusCode.FAILED_PRECONDITION: "wrong",
    grpc.StatusCode.INVALID_ARGUMENT: "wrong",
}
_RETRY_S = 2.0  # an encode worker that was late or lost gets no request for so many seconds


@dataclass(slots=True)
class _Encoder:
    """An encode worker."""

    record: WorkerRecord
    channel: grpc.aio.Channel
    num_open: int = 0  # requests that it has not answered
    has_left: bool = False  # it gets no request; the channel closes after the last answer
    left_out_until: float = 0.0  # time.monotonic() time


class Encoders:
    """The encode workers of this worker's model. All methods belong to the event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        link: EngineLink,
        model_fingerprint: str,
        count: Callable[[Outcome], None],
    ) -> None:
        """`count` counts the outcome of a request."""
        self._deadline_s = config.transfer.encode_deadline_s
        self._calls = PeerCalls(config.cluster.cluster_id, config.cluster.token, config.tls_dir)
        self._link = link
        self._fingerprint = model_fingerprint
        self._count = count
        self._encoders: dict[tuple[str, str], _Encoder] = {}  # by worker id and epoch
        self._refused: set[tuple[str, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_up = False
        self._is_closed = False

    def update(self, records: Collection[WorkerRecord]) -> None:
        """Takes the records of all workers. Encode workers of another checkpoint are not used."""
        if self._is_closed:  # this worker still reads records until it has left the cluster
            return
        found = {(r.worker_id, r.epoch): r for r in records if r.role == "encode"}
        for key, record in found.items():
            is_same = record.compatibility.model_fingerprint == self._fingerprint
            if not is_same and key not in self._refused:
                log.warning(
                    "the encode worker %s is not used, because it has another checkpoint: its "
                    "model_fingerprint is %s, not %s",
                    record.worker_id,
                    record.compatibility.model_fingerprint,
                    self._fingerprint,
                )
                self._refused.add(key)
            if is_same and record.state == "ready" and key not in self._encoders:
                self._encoders[key] = _Encoder(record, self._calls.open(record.address))
        self._refused &= found.keys()
        for key in list(self._encoders):
            if key not in found or found[key].state != "ready":
                encoder = self._encoders.pop(key)
                encoder.has_left = True
                if not encoder.num_open:
                    close_soon(encoder.channel)
        if self._is_up != bool(self._encoders):
            self._is_up = not self._is_up
            self._link.send(messages.EncodePool(self._is_up))

    @property
    def num_workers(self) -> int:
        """Number of encode workers that are ready and have the same checkpoint."""
        return len(self._encoders)

    def on_wanted(self, wanted: messages.ImageWanted) -> None:
        """Answers the engine's request for an embedding, later."""
        task = asyncio.create_task(self._answer(wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Ends all requests. Later ones are answered with an error."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        encoders, self._encoders = self._encoders, {}
        for encoder in encoders.values():
            await encoder.channel.close(None)

    async def _answer(self, wanted: messages.ImageWanted) -> None:
        why = "this worker ends"
        rows: bytearray | None = None
        try:
            rows = await self._encode(wanted)
        except TandemError as error:
            why = error.message
            log.info("this worker computes an image itself: %s", why)
        except Exception as error:
            why = repr(error)
            log.exception("an image could not be requested from an encode worker")
        finally:
            answer = messages.ImageEncoded(wanted.request_id, "" if rows is not None else why)
            self._link.send(answer, None if rows is None else memoryview(rows))

    async def _encode(self, wanted: messages.ImageWanted) -> bytearray:
        """Returns the bytes of an embedding. Raises Incompatible if it cannot be used, and
        WorkerLost if none came in time."""
        encoder = self._choose(wanted.digest)
        name = encoder.record.worker_id
        encoder.num_open += 1
        outcome: Outcome = "lost"
        try:
            async with asyncio.timeout(self._deadline_s):
                rows = await self._read(encoder, wanted)
            outcome = "encoded"
            return rows
        except TimeoutError:
            outcome = "late"
            raise WorkerLost(f"{name} has not sent it after {self._deadline_s:g} s") from None
        except Incompatible:
            outcome = "wrong"
            raise
        except grpc.aio.AioRpcError as error:
            outcome = _OUTCOMES.get(error.code(), "lost")
            raise WorkerLost(f"{name}: {error.code().name}: {error.details()}") from None
        finally:
            encoder.num_open -= 1
            if encoder.has_left and not encoder.num_open:
                close_soon(encoder.channel)
            if outcome in ("late", "lost"):
                encoder.left_out_until = time.monotonic() + _RETRY_S
            self._count(outcome)

    def _choose(self, digest: bytes) -> _Encoder:
        """Chooses the encode worker with the fewest open requests. Of those with equally many, the
        digest decides, so that several workers request an image from the same one, which may have
        kept it. Raises WorkerLost if there is none."""
        now = time.monotonic()
        usable = [e for e in self._encoders.values() if e.left_out_until <= now]
        if not usable:
            self._count("lost")
            raise WorkerLost("no encode worker answers")
        return min(usable, key=lambda e: (e.num_open, _rank(e.record.worker_id, digest)))

    async def _read(self, encoder: _Encoder, wanted: messages.ImageWanted) -> bytearray:
        """Reads an embedding. Raises Incompatible if it is not the requested one."""
        stub: Any = WorkerStub(encoder.channel)  # type: ignore[no-untyped-call]
        request = pb.EncodeRequest(
            model_fingerprint=self._fingerprint,
            digest=wanted.digest,
            data=wanted.data,
            num_rows=wanted.num_rows,
            cache_salt=wanted.cache_salt,
        )
        call = stub.Encode(request, metadata=self._calls.metadata, wait_for_ready=False)
        try:
            head = None
            rows = bytearray()
            async for message in call:
                if head is None:
                    head = message
                    _check(head, wanted, self._fingerprint)
                rows += message.data
                if len(rows) > wanted.num_rows * wanted.hidden_size * ROW_BYTES:
                    break
        finally:
            call.cancel()
        if len(rows) != wanted.num_rows * wanted.hidden_size * ROW_BYTES:
            raise Incompatible(
                f"{encoder.record.worker_id} sent {len(rows)} bytes; the embedding has "
                f"{wanted.num_rows} rows of {wanted.hidden_size} numbers"
            )
        return rows


def _check(head: pb.EncodedImage, wanted: messages.ImageWanted, fingerprint: str) -> None:
    """Raises Incompatible if an embedding is not the requested one."""
    needed = {
        "model_fingerprint": fingerprint,
        "digest": wanted.digest,
        "num_rows": wanted.num_rows,
        "hidden_size": wanted.hidden_size,
        "dtype": DTYPE,
    }
    for name, value in needed.items():
        if getattr(head, name) != value:
            raise Incompatible(
                f"the embedding that an encode worker sent is not used: its {name} is "
                f"{getattr(head, name)!r}, not {value!r}"
            )


def _rank(worker_id: str, digest: bytes) -> bytes:
    return blake2b(digest, key=worker_id.encode()[:64], digest_size=8).digest()
