"""Computes the embeddings of images that other workers request (`Encode`).

    request --kept--> sent
    request --not kept--> queued --> computing --> kept, sent

One thread computes one image after the other, because one image uses all threads of the vision
tower. Requests for an image that is queued or computed wait for it together. At most QUEUE_MAX
images are queued; further requests are refused, and their workers compute the images themselves. A
queued image leaves the queue with its last request, so that no later request waits for it in vain.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import torch

from tandem.common.prompt_image import DIGEST_BYTES, PromptImage
from tandem.engine.image_rows import Encode, KeptRows, Key, compute_rows
from tandem.errors import InternalError, TandemError
from tandem.net.rpc.failures import abort
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.encoders import DTYPE

QUEUE_MAX = 64  # images that are queued or computed
PIECE_BYTES = 1 << 20  # largest size of the rows in one message


@dataclass(slots=True)
class _Computing:
    """An image that is queued or computed."""

    image: PromptImage | None  # None: it has left the queue; the thread only holds this object
    rows: Future[torch.Tensor] = field(init=False)
    task: asyncio.Task[torch.Tensor] = field(init=False)
    num_waiting: int = 0  # requests that wait for it


class EncodeService:
    """The images of one encode worker. All methods belong to the event loop."""

    def __init__(
        self,
        encode: Encode,
        model_fingerprint: str,
        on_computed: Callable[[float], None],
        cores: Sequence[int] = (),
    ) -> None:
        """`on_computed` gets the seconds in which an image was computed. `cores` are the cores on
        which images are computed; empty: all."""
        self._encode = encode
        self._fingerprint = model_fingerprint
        self._on_computed = on_computed
        self._kept = KeptRows()
        self._computing: dict[Key, _Computing] = {}
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="images", initializer=_pin, initargs=(cores,)
        )
        self._begun_at = 0.0  # time.monotonic() time at which the current image was begun; 0: none
        self.num_open = 0  # requests that are not answered
        self.is_draining = False

    @property
    def num_images(self) -> int:
        """Number of images that are queued or computed."""
        return len(self._computing)

    @property
    def computing_s(self) -> float:
        """Seconds for which the current image has been computed; 0 if there is none."""
        begun_at = self._begun_at
        return time.monotonic() - begun_at if begun_at else 0.0

    def forget(self) -> None:
        """Drops all embeddings that are kept."""
        self._kept = KeptRows()

    def close(self) -> None:
        """Ends the thread after the current image."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def serve(
        self, request: pb.EncodeRequest, context: Any
    ) -> AsyncIterator[pb.EncodedImage]:
        """Yields the embedding of an image in pieces."""
        if self.is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is draining")
        if request.model_fingerprint != self._fingerprint:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the checkpoints differ: the model_fingerprint of this encode worker is "
                f"{self._fingerprint}, not {request.model_fingerprint[:80]!r}",
            )
        if len(request.digest) != DIGEST_BYTES or not request.num_rows:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the digest must have {DIGEST_BYTES} bytes, and num_rows must be at least 1",
            )
        self.num_open += 1
        try:
            rows = await self._rows(request, context)
            if len(rows) != request.num_rows:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the image has {len(rows)} rows, not {request.num_rows}",
                )
            yield pb.EncodedImage(
                model_fingerprint=self._fingerprint,
                digest=request.digest,
                num_rows=rows.shape[0],
                hidden_size=rows.shape[1],
                dtype=DTYPE,
            )
            numbers: Any = rows.contiguous().numpy()
            data = memoryview(numbers).cast("B")
            for start in range(0, len(data), PIECE_BYTES):
                yield pb.EncodedImage(data=bytes(data[start : start + PIECE_BYTES]))
        finally:
            self.num_open -= 1

    async def _rows(self, request: pb.EncodeRequest, context: Any) -> torch.Tensor:
        key = request.cache_salt, request.digest
        if (rows := self._kept.find(key)) is not None:
            return rows
        if key not in self._computing:
            if len(self._computing) >= QUEUE_MAX:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{QUEUE_MAX} images wait already"
                )
            image = PromptImage(request.digest, request.data, [0], request.num_rows)
            self._computing[key] = self._queue(key, image)
        computing = self._computing[key]
        computing.num_waiting += 1
        try:
            # If the client leaves, the computation goes on: others may wait for it.
            return await asyncio.shield(computing.task)
        except TandemError as error:
            await abort(context, error)
        finally:
            computing.num_waiting -= 1
            # `cancel` returns False if the computation has begun.
            if not computing.num_waiting and computing.rows.cancel():
                computing.image = None
                self._drop(key, computing)

    def _queue(self, key: Key, image: PromptImage) -> _Computing:
        computing = _Computing(image)
        computing.rows = self._thread.submit(self._run, computing)
        computing.task = asyncio.create_task(self._keep(key, computing.rows))
        computing.task.add_done_callback(partial(self._on_end, key, computing))
        return computing

    def _drop(self, key: Key, computing: _Computing) -> None:
        if self._computing.get(key) is computing:
            del self._computing[key]

    def _on_end(self, key: Key, computing: _Computing, task: asyncio.Task[torch.Tensor]) -> None:
        self._drop(key, computing)
        if not task.cancelled():
            task.exception()  # all clients may have left, so that nobody else reads the error

    async def _keep(self, key: Key, future: Future[torch.Tensor]) -> torch.Tensor:
        try:
            rows = await asyncio.wrap_future(future)
        except (TandemError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise InternalError(f"an image cannot be computed: {error!r:.200}") from error
        self._kept.keep(key, rows)
        return rows

    def _run(self, computing: _Computing) -> torch.Tensor:
        image = computing.image
        assert image is not None
        self._begun_at = began = time.monotonic()
        try:
            return compute_rows(self._encode, image)
        finally:
            self._begun_at = 0.0
            self._on_computed(time.monotonic() - began)


def _pin(cores: Sequence[int]) -> None:
    """Pins this thread, and the ones that it starts, to those of these cores that exist."""
    if allowed := set(cores) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)
