"""The steps over which kernels are tuned."""

from __future__ import annotations

import pytest

from tandem.engine.executor.triton.tuning_shapes import (
    repeated_blocks,
    tuned_chunks,
    tuned_context,
)


@pytest.mark.parametrize(
    ("step_tokens", "max_model_len", "wanted"),
    [
        (2048, 131_072, [(n, 4096) for n in (128, 2048, 16, 32, 64, 256, 512, 1024)]),
        (
            8192,
            5000,
            [(n, max(n, 4096)) for n in (128, 5000, 16, 32, 64, 256, 512, 1024, 2048, 4096)],
        ),
        (2048, 1000, [(n, 1000) for n in (128, 1000, 16, 32, 64, 256, 512)]),
        (64, 131_072, [(n, 4096) for n in (64, 16, 32)]),
        (512, 20, [(20, 20), (16, 20)]),
        (512, 10, [(10, 10)]),
    ],
)
def test_chunks_of_the_servers_steps(
    step_tokens: int, max_model_len: int, wanted: list[tuple[int, int]]
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
