"""The embeddings of images in an engine: requested from an encode worker or computed in a thread
when a chunk of a prompt needs them, and kept for later prompts with the same image.

The states of an image's embedding:

    absent     --a chunk needs it, there is an encode worker-->   requested
    absent     --a chunk needs it, there is no encode worker-->   computing
    requested  --`settle`, after it came-->                       kept
    requested  --`settle`, after an error-->                      computing
    computing  --`settle`, after it was computed-->               kept
    computing  --`settle`, after an error-->                      absent; its sequences fail
    kept       --others were used later, memory is full-->        absent

A sequence holds the embeddings that it still needs, also after they are absent here. An embedding
that is kept is used only by sequences with the same cache salt, so that the time of a request does
not tell which images other tenants have sent.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.common.process.hang_limit import hang_limit
from tandem.common.prompt_image import DIGEST_BYTES, PromptImage
from tandem.errors import BadRequest, InternalError, TandemError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Computes the embedding of an image from its file: fp32 [rows, hidden] on the host. Raises
# TandemError.
Encode = Callable[[PromptImage], "torch.Tensor"]
# Requests the embedding of an image with a cache salt from an encode worker. Returns None if there
# is no encode worker. The future fails with TandemError if no encode worker computes the embedding.
Fetch = Callable[[PromptImage, bytes], "Future[torch.Tensor] | None"]
Key = tuple[bytes, bytes]  # cache salt and digest of an image

KEPT_BYTES_MAX = 64 << 20  # largest size of all embeddings that are kept
ENCODE_DEADLINE_S = 300.0  # the process ends if one embedding takes longer


def compute_rows(encode: Encode, image: PromptImage) -> torch.Tensor:
    """Computes the embedding of an image, fp32 [rows, hidden] on the host. Raises TandemError."""
    rows = encode(image)
    if len(rows) != image.num_rows:
        raise InternalError(
            f"an image has {len(rows)} rows, but {image.num_rows} tokens in the prompt; the "
            "router and the worker must have the same files of the model"
        )
    return rows


class KeptRows:
    """Embeddings that are kept, up to KEPT_BYTES_MAX; those that were used last stay longest."""

    def __init__(self) -> None:
        self._rows: OrderedDict[Key, torch.Tensor] = OrderedDict()
        self._num_bytes = 0

    def find(self, key: Key) -> torch.Tensor | None:
        """Returns an embedding, or None if it is not kept."""
        if (rows := self._rows.get(key)) is not None:
            self._rows.move_to_end(key)
        return rows

    def keep(self, key: Key, rows: torch.Tensor) -> None:
        """Keeps an embedding. Others are dropped if memory is full, but never this one."""
        if (before := self._rows.pop(key, None)) is not None:
            self._num_bytes -= before.nbytes
        self._rows[key] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > KEPT_BYTES_MAX and len(self._rows) > 1:
            self._num_bytes -= self._rows.popitem(last=False)[1].nbytes


@dataclass(frozen=True, slots=True)
class _Awaited:
    """An embedding that is requested or computed."""

    image: PromptImage
    rows: Future[torch.Tensor]
    is_requested: bool


class ImageRows:
    """The embeddings of images that are kept, requested or computed. All methods belong to the
    engine's thread."""

    def __init__(
        self, encode: Encode | None, why_none: str = "", fetch: Fetch = lambda image, salt: None
    ) -> None:
        """`encode` is None if this engine takes no images; `why_none` then says why."""
        self._encode = encode
        self._why_none = why_none
        self._fetch = fetch
        self._kept = KeptRows()
        self._awaited: dict[Key, _Awaited] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images")

    @property
    def is_computing(self) -> bool:
        """True while an embedding is requested or computed."""
        return bool(self._awaited)

    def check(self, images: tuple[PromptImage, ...], num_prompt_tokens: int) -> None:
        """Raises BadRequest if this engine takes no images, or their tokens are not in the prompt,
        one image after the other."""
        if not images:
            return
        if self._encode is None:
            raise BadRequest(f"this worker takes no images: {self._why_none}", param="messages")
        end = 0
        for image in images:
            if not image.run_length or not image.starts or len(image.digest) != DIGEST_BYTES:
                raise BadRequest(
                    f"an image has no tokens in the prompt, or its digest has not {DIGEST_BYTES} "
                    "bytes",
                    param="messages",
                )
            for start in image.starts:
                if not end <= start <= num_prompt_tokens - image.run_length:
                    raise BadRequest(
                        f"an image has tokens from {start} to {start + image.run_length - 1}; they "
                        f"must be from {end} to {num_prompt_tokens - 1}",
                        param="messages",
                    )
                end = start + image.run_length

    def find(self, image: PromptImage, cache_salt: bytes) -> torch.Tensor | None:
        """Returns the embedding of an image, or None while it is requested or computed. Starts this
        if nobody has."""
        key = cache_salt, image.digest
        if (rows := self._kept.find(key)) is not None and len(rows) == image.num_rows:
            return rows
        if key not in self._awaited:
            requested = self._fetch(image, cache_salt)
            self._awaited[key] = (
                self._compute(image) if requested is None else _Awaited(image, requested, True)
            )
        return None

    def _compute(self, image: PromptImage) -> _Awaited:
        return _Awaited(image, self._thread.submit(self._run, image), False)

    def _run(self, image: PromptImage) -> torch.Tensor:
        assert self._encode is not None
        with hang_limit(ENCODE_DEADLINE_S):
            return compute_rows(self._encode, image)

    def settle(self) -> dict[Key, TandemError]:
        """Keeps the embeddings that came or were computed. Starts to compute those that no encode
        worker has computed. Returns the errors of the others, by the cache salt and the image's
        digest."""
        errors: dict[Key, TandemError] = {}
        for key, awaited in list(self._awaited.items()):
            if not awaited.rows.done():
                continue
            del self._awaited[key]
            try:
                self._kept.keep(key, awaited.rows.result())
            except Exception as error:
                if awaited.is_requested:
                    self._awaited[key] = self._compute(awaited.image)
                elif isinstance(error, TandemError):
                    errors[key] = error
                else:
                    log.exception("an image's embedding cannot be computed")
                    errors[key] = InternalError(f"an image cannot be computed: {error!r:.200}")
        return errors

    def wait(self, seconds: float) -> None:
        """Waits until an embedding has come or is computed, at most so many seconds."""
        rows = [awaited.rows for awaited in self._awaited.values()]
        wait(rows, seconds, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        """Ends the thread. Embeddings that were not begun are not computed."""
        self._thread.shutdown(wait=True, cancel_futures=True)
