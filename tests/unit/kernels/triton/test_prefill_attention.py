"""Prefill attention over prefix and chunk against attention written out, over shapes that hurt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tandem_kernels.triton.prefill_attention import prefill_attention
from tests.unit.kernels.triton.paged import TOLERANCES, Paged, name_of, random_queries

Chunk = tuple[int, int]  # prefix, tokens of the chunk


def check(
    chunks: Sequence[Chunk],
    device: torch.device,
    *,
    group_size: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: str = "",
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    paged = Paged.random(
        [prefix + n for prefix, n in chunks],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=kv_dtype or name_of(dtype),
        device=device,
    )
    counts = torch.tensor([n for _, n in chunks], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    queries = random_queries(int(starts[-1]), group_size * num_kv_heads, head_dim, dtype, device)
    expected = torch.zeros_like(queries, dtype=torch.double)
    for seq, (_, num_tokens) in enumerate(chunks):
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        if num_tokens:
            expected[rows] = paged.attention(seq, queries[rows], window, sinks)
        paged.pass_window(seq, num_tokens, window)
    out = prefill_attention(
        queries,
        paged.layer,
        paged.block_tables,
        paged.context_lens,
        starts.to(device),
        window,
        sinks=sinks,
        scales=paged.scales,
    )
    assert out.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(0, 67)],
        [(130, 1)],
        [(63, 5), (0, 2)],
        [(0, 0), (17, 33)],
        [(5, 0), (0, 3), (64, 64), (9, 0)],
        [(0, 1)] * 7 + [(31, 40)],
    ],
)
def test_chunks(chunks: list[Chunk], device: torch.device) -> None:
    check(chunks, device)


@pytest.mark.parametrize("group_size", [1, 2, 4, 5, 7, 8])
def test_query_groups(group_size: int, device: torch.device) -> None:
    check([(20, 19), (0, 13)], device, group_size=group_size)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int, device: torch.device) -> None:
    check([(50, 23)], device, head_dim=head_dim, num_kv_heads=1)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64])
def test_block_sizes(block_size: int, device: torch.device) -> None:
    check([(41, 30), (0, 9)], device, block_size=block_size, num_kv_heads=1)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8_e4m3"])
def test_bfloat16(kv_dtype: str, device: torch.device) -> None:
    check([(41, 30), (0, 70)], device, dtype=torch.bfloat16, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("window", [None, 20])
def test_quantized_kv(window: int | None, kv_dtype: str, device: torch.device) -> None:
    chunks = [(70, 60), (0, 5), (130, 1)]
    check(chunks, device, head_dim=80, block_size=12, kv_dtype=kv_dtype, window=window)


@pytest.mark.parametrize("window", [1, 20, 64, 100])
@pytest.mark.parametrize("group_size", [1, 3])
def test_a_window(window: int, group_size: int, device: torch.device) -> None:
    chunks = [(0, 150), (0, 5), (130, 1), (70, 90), (0, 0), (200, 30)]
    check(chunks, device, num_kv_heads=1, group_size=group_size, head_dim=16, window=window)


@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None, device: torch.device) -> None:
    sinks = torch.tensor([0.0, 3.0, 200.0, -200.0], device=device)
    check([(0, 70), (60, 1), (0, 0), (5, 33)], device, group_size=2, window=window, sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_all_together(
    block_size: int, group_size: int, head_dim: int, device: torch.device
) -> None:
    check(
        [(0, 129), (0, 0), (200, 77), (511, 1), (64, 64)],
        device,
        block_size=block_size,
        group_size=group_size,
        head_dim=head_dim,
        dtype=torch.bfloat16,
    )
