"""Images in prompts, as processes exchange them.

The chat template and the model's rules give an image several runs of tokens in the prompt, such as
one for each tile. The model computes an embedding for the image: a matrix with one row for each of
these tokens. The rows take the place of the tokens' own embeddings:

    tokens    [ a b <tile> i i i i <tile> i i i i c ]        starts = [3, 8], run_length = 4
    rows                   0 1 2 3        4 5 6 7
"""

import struct
from collections.abc import Iterator, Sequence

import msgspec

DIGEST_BYTES = 16
_FLAG = 1 << 31


class PromptImage(msgspec.Struct, frozen=True):
    # Hash of `data` and of the options by which the image is processed. Two images with one digest
    # have the same embedding.
    digest: bytes
    data: bytes  # the file, as the client sent it
    starts: list[int]  # index in the prompt of the first token of each run, in ascending order
    run_length: int  # number of tokens of each run

    @property
    def num_rows(self) -> int:
        """Number of rows of the image's embedding."""
        return len(self.starts) * self.run_length

    def rows_in(self, first: int, end: int) -> Iterator[tuple[int, range]]:
        """Yields, for each run with tokens among the prompt's tokens `first` to `end` - 1, the
        index of the first of these tokens, and their rows in the image's embedding."""
        length = self.run_length
        for number, start in enumerate(self.starts):
            low, high = max(start, first), min(start + length, end)
            if low < high:
                offset = number * length - start
                yield low, range(low + offset, high + offset)


def with_flags(token_ids: list[int], images: Sequence[PromptImage]) -> list[int]:
    """Returns token ids with the highest of 32 bits flipped in the images' tokens. Messages between
    processes have them so: a worker of a version that knows no images then refuses the token ids,
    instead of ignoring the images. A second call returns the ids as they were."""
    if not images:
        return token_ids
    flagged = list(token_ids)
    for image in images:
        for start in image.starts:
            for at in range(start, min(start + image.run_length, len(flagged))):
                flagged[at] ^= _FLAG
    return flagged


def image_marks(images: Sequence[PromptImage], block_size: int) -> dict[int, bytes]:
    """Returns what the hashes of blocks with tokens of images cover beside the token ids, by the
    index of the block: for each run in the block, the image's digest, and which of the image's rows
    are at which places."""
    marks: dict[int, bytes] = {}
    for image in images:
        length = image.run_length
        for number, start in enumerate(image.starts):
            for block in range(start // block_size, (start + length - 1) // block_size + 1):
                first = max(start, block * block_size)
                end = min(start + length, (block + 1) * block_size)
                place = (first % block_size, number * length + first - start, end - first)
                marks[block] = marks.get(block, b"") + image.digest + struct.pack("<3I", *place)
    return marks
