"""The embeddings of images in an engine: computed in a thread when a chunk of a prompt needs them,
and kept for later prompts with the same image.

The states of an image's embedding:

    absent     --a chunk needs it-->                         computing
    computing  --`settle`, after it was computed-->          kept
    computing  --`settle`, after an error-->                 absent; its sequences fail
    kept       --others were used later, memory is full-->   absent

A sequence holds the embeddings that it still needs, also after they are absent here.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
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

KEPT_BYTES_MAX = 64 << 20  # largest size of all embeddings that are kept
ENCODE_DEADLINE_S = 300.0  # the process ends if one embedding takes longer


class ImageRows:
    """The embeddings of images that are kept or being computed. All methods belong to the engine's
    thread."""

    def __init__(self, encode: Encode | None, why_none: str = "") -> None:
        """`encode` is None if this engine takes no images; `why_none` then says why."""
        self._encode = encode
        self._why_none = why_none
        # digest -> embedding; the one that was used last is last
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._computing: dict[bytes, Future[torch.Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images")

    @property
    def is_computing(self) -> bool:
        return bool(self._computing)

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

    def find(self, image: PromptImage) -> torch.Tensor | None:
        """Returns the embedding of an image, or None while it is computed. Starts to compute it if
        nobody has."""
        if (rows := self._kept.get(image.digest)) is not None:
            self._kept.move_to_end(image.digest)
            return rows
        if image.digest not in self._computing:
            self._computing[image.digest] = self._thread.submit(self._run, image)
        return None

    def _run(self, image: PromptImage) -> torch.Tensor:
        assert self._encode is not None
        with hang_limit(ENCODE_DEADLINE_S):
            rows = self._encode(image)
        if len(rows) != image.num_rows:
            raise InternalError(
                f"an image has {len(rows)} rows, but {image.num_rows} tokens in the prompt; the "
                "router and the worker must have the same files of the model"
            )
        return rows

    def settle(self) -> dict[bytes, TandemError]:
        """Keeps the embeddings that were computed. Returns the errors of the others, by the image's
        digest."""
        errors: dict[bytes, TandemError] = {}
        for digest, future in list(self._computing.items()):
            if not future.done():
                continue
            del self._computing[digest]
            try:
                self._kept[digest] = future.result()
            except TandemError as error:
                errors[digest] = error
            except Exception as error:
                log.exception("an image's embedding cannot be computed")
                errors[digest] = InternalError(f"an image cannot be computed: {error!r:.200}")
        num_bytes = sum(rows.nbytes for rows in self._kept.values())
        while num_bytes > KEPT_BYTES_MAX and len(self._kept) > 1:
            num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return errors

    def wait(self, seconds: float) -> None:
        """Waits until an embedding is computed, at most so many seconds."""
        wait(self._computing.values(), seconds, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        """Ends the thread. Embeddings that were not begun are not computed."""
        self._thread.shutdown(wait=True, cancel_futures=True)
