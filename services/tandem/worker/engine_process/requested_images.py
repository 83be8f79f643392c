"""The embeddings of images that an engine has requested from encode workers.

The engine process has no network, so its I/O process passes each request on (worker/encoders.py),
and answers all of them.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from tandem.common.prompt_image import PromptImage
from tandem.errors import InternalError, WorkerLost
from tandem.worker.engine_process.messages import ImageEncoded, ImageWanted

ROW_BYTES = 4  # of each number of a row, which is float32


class RequestedImages:
    """Requests embeddings and takes the answers. All methods belong to the engine's thread."""

    def __init__(self, send: Callable[[ImageWanted], None]) -> None:
        """`send` sends a message to the I/O process."""
        self._send = send
        self.has_encoders = False  # True while there is an encode worker
        self.hidden_size = 0
        self._request_ids = itertools.count(1)
        # request id -> (number of rows, future of the embedding)
        self._open: dict[int, tuple[int, Future[torch.Tensor]]] = {}

    def fetch(self, image: PromptImage, cache_salt: bytes) -> Future[torch.Tensor] | None:
        """Requests the embedding of an image: fp32 [rows, hidden] on the host. Returns None if
        there is no encode worker."""
        if not self.has_encoders:
            return None
        request_id = next(self._request_ids)
        future: Future[torch.Tensor] = Future()
        self._open[request_id] = image.num_rows, future
        self._send(
            ImageWanted(
                request_id, image.digest, image.data, image.num_rows, self.hidden_size, cache_salt
            )
        )
        return future

    def take(self, answer: ImageEncoded, frames: Sequence[bytes]) -> None:
        """Takes an answer, whose second frame has the embedding unless there is an error."""
        num_rows, future = self._open.pop(answer.request_id)
        if answer.error:
            future.set_exception(WorkerLost(answer.error))
        elif len(frames[1]) != num_rows * self.hidden_size * ROW_BYTES:
            future.set_exception(InternalError("an image's embedding has another size"))
        else:
            # A copy, because torch does not read memory that nobody may write.
            rows = torch.frombuffer(bytearray(frames[1]), dtype=torch.float32)
            future.set_result(rows.view(num_rows, self.hidden_size))
