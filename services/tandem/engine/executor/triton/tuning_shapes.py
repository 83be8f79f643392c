"""The steps over which a worker tunes its kernels at start. They are as large as the steps that the
worker runs later, because the fastest tile sizes depend on the lengths of chunks and contexts.

The functions are pure. Where a step needs more blocks than the pool has, its block table repeats
blocks: the kernels then read as much as they do later, though partly from the cache.
"""

from typing import NamedTuple

CONTEXT_LEN = 4096  # a context that is long enough to be typical of chats and documents
_CONTEXT_LEN_MIN = 1024  # contexts of decode are not shorter, however small the pool is
_SMALL_CHUNK = 128  # the kernels are tuned separately for steps with few tokens (SMALL_TOKENS)


class Chunk(NamedTuple):
    num_tokens: int
    context_len: int  # the chunk included


def tuned_chunks(step_tokens: int, max_model_len: int) -> list[Chunk]:
    """Returns the prefill chunks of the steps that are tuned: one of few tokens, and the largest
    one, which has `step_tokens` tokens. Each is the end of a context of up to 4,096 tokens."""
    chunks = []
    for num_tokens in (min(_SMALL_CHUNK, step_tokens), step_tokens):
        num_tokens = min(num_tokens, max_model_len)
        chunks.append(Chunk(num_tokens, min(max_model_len, max(CONTEXT_LEN, num_tokens))))
    return chunks


def tuned_context(num_seqs: int, *, pool_tokens: int, max_model_len: int) -> int:
    """Returns the length of the contexts of a tuned decode step: up to 4,096 tokens, or what each
    of the sequences has if they share the pool, which has `pool_tokens` tokens."""
    share = max(_CONTEXT_LEN_MIN, pool_tokens // num_seqs)
    return min(CONTEXT_LEN, share, max_model_len)


def repeated_blocks(context_len: int, block_size: int, num_blocks: int) -> list[int]:
    """Returns a block table for a context: the blocks of the pool in order, and again from the
    first one if the pool has too few."""
    return [block % num_blocks for block in range(-(-context_len // block_size))]
