"""The steps over which a worker tunes its kernels at start. They are as large as the steps that the
worker runs later, because the fastest tile sizes depend on the lengths of chunks and contexts.

The functions are pure. Where a step needs more blocks than the pool has, its block table repeats
blocks: the kernels then read as much as they do later, though partly from the cache.
"""

from typing import NamedTuple

CONTEXT_LEN = 4096  # a context that is long enough to be typical of chats and documents
_CONTEXT_LEN_MIN = 1024  # contexts of decode are not shorter, however small the pool is
_SMALL_CHUNK = 128  # attention is tuned separately for steps with few tokens (SMALL_TOKENS)
_LEAST_CHUNK = 16  # rows of the smallest tile of a product


class Chunk(NamedTuple):
    num_tokens: int
    context_len: int  # the chunk included


def tuned_chunks(step_tokens: int, max_model_len: int) -> list[Chunk]:
    """Returns the prefill chunks of the steps that are tuned. Each is the end of a context of up to
    4,096 tokens.

    Attention is tuned by the first two chunks: one of few tokens, and the largest one, which has
    `step_tokens` tokens. The others, of 16, 32, 64 ... tokens, tune products, which have tiles of
    other sizes for few rows.
    """
    largest = min(step_tokens, max_model_len)
    sizes = [min(_SMALL_CHUNK, largest), largest]
    size = _LEAST_CHUNK
    while size < largest:
        sizes.append(size)
        size *= 2
    return [
        Chunk(num_tokens, min(max_model_len, max(CONTEXT_LEN, num_tokens)))
        for num_tokens in dict.fromkeys(sizes)
    ]


def tuned_context(num_seqs: int, *, pool_tokens: int, max_model_len: int) -> int:
    """Returns the length of the contexts of a tuned decode step: up to 4,096 tokens, or what each
    of the sequences has if they share the pool, which has `pool_tokens` tokens."""
    share = max(_CONTEXT_LEN_MIN, pool_tokens // num_seqs)
    return min(CONTEXT_LEN, share, max_model_len)


def repeated_blocks(context_len: int, block_size: int, num_blocks: int) -> list[int]:
    """Returns a block table for a context: the blocks of the pool in order, and again from the
    first one if the pool has too few."""
    return [block % num_blocks for block in range(-(-context_len // block_size))]
