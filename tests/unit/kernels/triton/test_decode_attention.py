"""Split-KV decode attention against attention written out, over shapes that hurt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tandem_kernels.triton.decode_attention import Splits, choose_splits, decode_attention
from tests.unit.kernels.triton.paged import TOLERANCES, Paged, name_of, random_queries


def check(
    lens: Sequence[int],
    device: torch.device,
    *,
    group_size: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    num_splits: int = 1,
    num_filling: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: str = "",
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    paged = Paged.random(
        lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=kv_dtype or name_of(dtype),
        device=device,
    )
    queries = random_queries(len(lens), group_size * num_kv_heads, head_dim, dtype, device)
    wanted = [
        paged.attention(seq, queries[seq : seq + 1], window, sinks)
        for seq, n in enumerate(lens)
        if n
    ]
    for seq in range(len(lens)):
        paged.pass_window(seq, 1, window)
    out = decode_attention(
        queries,
        paged.layer,
        paged.block_tables,
        paged.context_lens,
        splits=Splits(num_splits, num_filling or num_splits),
        window=window,
        sinks=sinks,
        scales=paged.scales,
    )
    assert out.dtype == dtype
    for seq, context_len in enumerate(lens):
        if context_len:
            expected = wanted.pop(0)[0]
        else:
            expected = torch.zeros_like(out[seq], dtype=torch.double)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(out[seq].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("lens", [[1], [0, 5], [16, 0, 131], [65, 64, 63, 1]])
def test_lengths_and_splits(lens: list[int], num_splits: int, device: torch.device) -> None:
    check(lens, device, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None, num_splits: int, device: torch.device) -> None:
    sinks = torch.tensor([0.0, 3.0, -2.0, 9.0, 200.0, -200.0], device=device)
    check([65, 0, 1, 131], device, num_splits=num_splits, window=window, sinks=sinks)


@pytest.mark.parametrize("group_size", [1, 2, 4, 5, 7, 8, 20])
def test_query_groups(group_size: int, device: torch.device) -> None:
    check([37], device, group_size=group_size, num_splits=2)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int, device: torch.device) -> None:
    check([70, 3], device, head_dim=head_dim, num_splits=2)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64])
def test_block_sizes(block_size: int, device: torch.device) -> None:
    check([100, 9], device, block_size=block_size, num_kv_heads=1, num_splits=2)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "fp8_e4m3"])
def test_bfloat16(kv_dtype: str, device: torch.device) -> None:
    check([70, 1], device, dtype=torch.bfloat16, kv_dtype=kv_dtype, num_splits=2)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("window", [None, 20])
def test_quantized_kv(window: int | None, kv_dtype: str, device: torch.device) -> None:
    sizes = {"head_dim": 80, "block_size": 12, "num_splits": 2}
    check([131, 0, 7], device, kv_dtype=kv_dtype, window=window, **sizes)


@pytest.mark.parametrize("window", [1, 20, 64, 100])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_window(window: int, num_splits: int, device: torch.device) -> None:
    check([0, 7, 64, 150, 211], device, num_kv_heads=1, num_splits=num_splits, window=window)


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [1, 4, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_all_together(
    block_size: int, group_size: int, head_dim: int, num_splits: int, device: torch.device
) -> None:
    check(
        [1, 0, 517, 64],
        device,
        block_size=block_size,
        group_size=group_size,
        head_dim=head_dim,
        num_splits=num_splits,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("window", [None, 1300])
def test_only_a_long_context_has_more_ranges_than_fill_the_device(
    window: int | None, device: torch.device
) -> None:
    sizes = {"group_size": 2, "num_kv_heads": 1, "head_dim": 16}
    check([2100, 40, 0], device, num_splits=4, num_filling=1, window=window, **sizes)


H100 = 132


@pytest.mark.parametrize(
    ("num_seqs", "context_len_max", "wanted"),
    [
        # Few sequences: the device is filled with contexts of any length.
        (1, 8192, Splits(64, 64)),
        (1, 128, Splits(2, 2)),
        (8, 8192, Splits(8, 8)),
        # The sequences alone fill the device: only long contexts are cut.
        (40, 4096, Splits(1, 1)),
        (40, 8192, Splits(2, 1)),
        (64, 131_072, Splits(32, 1)),
        # A long context has 32 ranges although 8 would fill the device with equal contexts.
        (8, 131_072, Splits(32, 8)),
        # Many sequences: the number of programs is bounded.
        (512, 131_072, Splits(4, 1)),
        (4096, 131_072, Splits(1, 1)),
    ],
)
def test_splits_of_llama_on_an_h100(num_seqs: int, context_len_max: int, wanted: Splits) -> None:
    assert choose_splits(num_seqs, 8, context_len_max, H100) == wanted


@pytest.mark.parametrize("num_multiprocessors", [1, 40, 108, 132, 148])
@pytest.mark.parametrize("num_kv_heads", [1, 4, 8, 40])
@pytest.mark.parametrize("context_len_max", [1, 63, 1000, 32_768, 1_000_000])
def test_long_contexts_fill_the_device_at_any_batch(
    num_multiprocessors: int, num_kv_heads: int, context_len_max: int
) -> None:
    for num_seqs in (1, 2, 5, 39, 40, 72, 256, 1000):
        splits = choose_splits(num_seqs, num_kv_heads, context_len_max, num_multiprocessors)
        assert 1 <= splits.num_filling <= splits.num_splits <= max(1, context_len_max // 64)
        heads = num_seqs * num_kv_heads
        if context_len_max >= 32_768:
            least = min(2 * num_multiprocessors, 64 * heads)
            assert heads * splits.num_splits >= least, (num_seqs, splits)
            # No range has more keys than 4,096, unless there would be too many programs.
            is_bounded = heads * splits.num_splits > 16 * 4 * num_multiprocessors
            is_most = splits.num_splits == 64
            assert context_len_max / splits.num_splits <= 4096 or is_bounded or is_most
