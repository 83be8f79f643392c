"""The steps over which kernels are tuned."""

from __future__ import annotations

import pytest

from tandem.engine.executor.triton.tuning_shapes import (
    Chunk,
    repeated_blocks,
    tuned_chunks,
    tuned_context,
)


@pytest.mark.parametrize(
    ("step_tokens", "max_model_len", "wanted"),
    [
        (2048, 131_072, [Chunk(128, 4096), Chunk(2048, 4096)]),
        (8192, 131_072, [Chunk(128, 4096), Chunk(8192, 8192)]),
        (2048, 1000, [Chunk(128, 1000), Chunk(1000, 1000)]),
        (64, 131_072, [Chunk(64, 4096), Chunk(64, 4096)]),
        (512, 20, [Chunk(20, 20), Chunk(20, 20)]),
    ],
)
def test_chunks_of_the_servers_steps(
    step_tokens: int, max_model_len: int, wanted: list[Chunk]
) -> None:
    assert tuned_chunks(step_tokens, max_model_len) == wanted


@pytest.mark.parametrize(
    ("num_seqs", "pool_tokens", "max_model_len", "wanted"),
    [
        (1, 400_000, 131_072, 4096),  # not the whole of a long context
        (256, 400_000, 131_072, 1562),  # what 256 sequences have in the pool
        (256, 8192, 131_072, 1024),
        (1, 400_000, 500, 500),
    ],
)
def test_contexts_are_those_of_requests(
    num_seqs: int, pool_tokens: int, max_model_len: int, wanted: int
) -> None:
    found = tuned_context(num_seqs, pool_tokens=pool_tokens, max_model_len=max_model_len)
    assert found == wanted


def test_a_small_pool_repeats_its_blocks() -> None:
    assert repeated_blocks(50, 16, 10) == [0, 1, 2, 3]
    assert repeated_blocks(50, 16, 3) == [0, 1, 2, 0]
