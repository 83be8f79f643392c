"""Latent attention's kernels against attention written out and against the torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tandem_kernels import norm, rope
from tandem_kernels.triton.decode_attention import Splits
from tandem_kernels.triton.latent_cache import norm_and_store_latents
from tandem_kernels.triton.latent_decode import choose_latent_splits, latent_decode_attention
from tandem_kernels.triton.latent_loop import LatentQueries
from tandem_kernels.triton.latent_prefill import latent_prefill_attention
from tests.unit.kernels.triton.paged import LAYER, TOLERANCES, Paged, name_of

EPS = 1e-6


def paged_latents(
    lens: Sequence[int], width: int, block_size: int, dtype: str, device: torch.device
) -> Paged:
    return Paged.random(
        lens,
        num_kv_heads=1,
        head_dim=width,
        block_size=block_size,
        dtype=dtype,
        device=device,
        has_values=False,
    )


def random_queries(
    num_tokens: int, num_heads: int, rank: int, rope: int, dtype: torch.dtype, device: torch.device
) -> LatentQueries:
    """Queries as the products leave them: the absorbed ones lie head by head, and the others are
    the ends of wider rows."""
    generator = torch.Generator().manual_seed(3)
    absorbed = torch.randn(num_heads, num_tokens, rank, generator=generator).to(device, dtype)
    heads = torch.randn(num_tokens, num_heads, 8 + rope, generator=generator).to(device, dtype)
    places = torch.randint(0, 9999, (num_tokens,), generator=generator)
    return LatentQueries(absorbed.transpose(0, 1), heads[..., 8:], *angles_at(places, rope, device))


def angles_at(
    positions: torch.Tensor, rope_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = rope.rotary_frequencies(rope_dim, 10_000.0)
    cosines, sines = rope.rotary_angles(positions, frequencies, 1.1)
    return cosines.to(device), sines.to(device)


def expected_of(paged: Paged, seq: int, queries: LatentQueries) -> torch.Tensor:
    rotated = rope.rotate(queries.turning, (queries.cosines, queries.sines))
    whole = torch.cat((queries.absorbed, rotated), -1)
    return paged.attention(seq, whole)[..., : queries.absorbed.shape[-1]]


def check_decode(
    lens: Sequence[int],
    device: torch.device,
    *,
    num_heads: int = 6,
    rank: int = 40,
    rope: int = 8,
    block_size: int = 16,
    num_splits: int = 1,
    num_filling: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: str = "",
) -> None:
    paged = paged_latents(lens, rank + rope, block_size, kv_dtype or name_of(dtype), device)
    queries = random_queries(len(lens), num_heads, rank, rope, dtype, device)
    out = latent_decode_attention(
        queries,
        paged.layer,
        paged.block_tables,
        paged.context_lens,
        splits=Splits(num_splits, num_filling or num_splits),
        scale=(rank + rope) ** -0.5,
    )
    assert out.shape == (len(lens), num_heads, rank)
    assert out.dtype == dtype
    tolerance = TOLERANCES[dtype]
    for seq, context_len in enumerate(lens):
        expected = torch.zeros_like(out[seq], dtype=torch.double)
        if context_len:
            expected = expected_of(paged, seq, queries.rows(seq, seq + 1))[0]
        torch.testing.assert_close(out[seq].double(), expected, rtol=tolerance, atol=tolerance)


def check_prefill(
    chunks: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    num_heads: int = 6,
    rank: int = 40,
    rope: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: str = "",
) -> None:
    """`chunks` are (prefix, tokens of the chunk)."""
    lens = [prefix + n for prefix, n in chunks]
    paged = paged_latents(lens, rank + rope, block_size, kv_dtype or name_of(dtype), device)
    starts = torch.tensor([0, *(n for _, n in chunks)]).cumsum(0).int()
    queries = random_queries(int(starts[-1]), num_heads, rank, rope, dtype, device)
    out = latent_prefill_attention(
        queries,
        paged.layer,
        paged.block_tables,
        paged.context_lens,
        starts.to(device),
        scale=(rank + rope) ** -0.5,
    )
    assert out.dtype == dtype
    tolerance = TOLERANCES[dtype]
    for seq, (_, num_tokens) in enumerate(chunks):
        if num_tokens:
            rows = int(starts[seq]), int(starts[seq + 1])
            expected = expected_of(paged, seq, queries.rows(*rows))
            found = out[slice(*rows)].double()
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_only_a_long_context_has_more_ranges_than_fill_the_device(device: torch.device) -> None:
    check_decode([1600, 20, 0], device, num_heads=2, num_splits=4, num_filling=1)


@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("lens", [[1], [0, 5], [16, 0, 131], [65, 64, 31, 1]])
def test_decode_of_any_lengths(lens: list[int], num_splits: int, device: torch.device) -> None:
    check_decode(lens, device, num_splits=num_splits)


@pytest.mark.parametrize(("num_heads", "rank", "rope"), [(1, 16, 4), (16, 64, 16), (37, 24, 10)])
def test_decode_of_tiles_of_heads(
    num_heads: int, rank: int, rope: int, device: torch.device
) -> None:
    sizes = {"num_heads": num_heads, "rank": rank, "rope": rope, "block_size": 12}
    check_decode([70, 9], device, num_splits=2, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes(dtype: torch.dtype, kv_dtype: str, device: torch.device) -> None:
    check_decode([70, 9], device, num_splits=4, dtype=dtype, kv_dtype=kv_dtype)
    check_prefill([(41, 30), (0, 9)], device, dtype=dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_seqs", "num_splits"), [(1, 1), (2, 64), (4, 3), (5, 4), (19, 8)])
def test_products_with_the_matrices_of_heads(
    num_seqs: int, num_splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    num_heads, rank, rope_dim = 3, 72, 8
    lens = [(0, 300, 1, 65)[i % 4] for i in range(1, num_seqs + 1)]
    paged = paged_latents(lens, rank + rope_dim, 16, name_of(dtype), device)
    queries = random_queries(num_seqs, num_heads, rank, rope_dim, dtype, device)
    values = torch.randn(num_heads, 24, rank, generator=torch.Generator().manual_seed(7))
    values = values.to(device, dtype)
    attended, projected = (
        latent_decode_attention(
            queries,
            paged.layer,
            paged.block_tables,
            paged.context_lens,
            splits=Splits(num_splits, num_splits),
            scale=0.1,
            values=each,
        )
        for each in (None, values)
    )
    assert projected.shape == (num_seqs, num_heads, 24)
    assert projected.is_contiguous()
    tolerance = TOLERANCES[dtype]
    expected = torch.einsum("thr,hvr->thv", attended.float(), values.float())
    torch.testing.assert_close(projected.float(), expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(0, 67)],
        [(130, 1)],
        [(63, 5), (0, 2)],
        [(5, 0), (0, 3), (64, 64), (9, 0)],
        [(0, 1)] * 7 + [(31, 40)],
    ],
)
def test_chunks(chunks: list[tuple[int, int]], device: torch.device) -> None:
    check_prefill(chunks, device)


@pytest.mark.parametrize(("num_heads", "rank", "rope"), [(1, 16, 4), (16, 64, 16), (70, 24, 10)])
def test_chunks_of_any_heads(num_heads: int, rank: int, rope: int, device: torch.device) -> None:
    sizes = {"num_heads": num_heads, "rank": rank, "rope": rope, "block_size": 12}
    check_prefill([(20, 19), (0, 3)], device, **sizes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_published_sizes(device: torch.device) -> None:
    sizes = {"num_heads": 128, "rank": 512, "rope": 64, "dtype": torch.bfloat16}
    check_decode([1, 0, 517, 64], device, num_splits=4, **sizes)  # type: ignore[arg-type]
    check_prefill([(0, 0), (200, 17), (0, 40)], device, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rank", "rope_dim", "has_latents"), [(16, 4, False), (40, 8, True), (24, 10, True)]
)
def test_norms_and_cache_write(
    rank: int,
    rope_dim: int,
    has_latents: bool,
    dtype: torch.dtype,
    norm_dtype: torch.dtype,
    kv_dtype: str,
    device: torch.device,
) -> None:
    if dtype == torch.float32 and norm_dtype == torch.bfloat16:
        pytest.skip("weights of norms are of the dtype of rows, or fp32")
    block_size, width = 12, rank + rope_dim
    ours, theirs = (paged_latents([30, 9], width, block_size, kv_dtype, device) for _ in range(2))
    slots = torch.tensor([3 * block_size + 5, -1, 0, 2 * block_size - 1], device=device)
    generator = torch.Generator().manual_seed(4)
    projected = torch.randn(4, 33 + width, generator=generator).to(device, dtype)
    queries, kv = projected[:, :33], projected[:, 33:]
    weight, q_weight = (
        torch.randn(n, generator=generator).to(device, norm_dtype) for n in (rank, 33)
    )
    angles = angles_at(torch.tensor([5, 0, 300, 99999]), rope_dim, device)
    layer_kv = ours.layer
    given = {"queries": queries, "q_norm": q_weight} if has_latents else {}

    normed = norm_and_store_latents(kv, angles, slots, layer_kv, norm=weight, eps=EPS, **given)

    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    if has_latents:
        expected = norm.rms_norm(queries, q_weight, EPS)
        torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)
    else:
        assert normed is None
    latents = norm.rms_norm(kv[:, :rank], weight, EPS)
    keys = rope.rotate(kv[:, None, rank:], angles).squeeze(1)
    stored = torch.cat((latents, keys), 1)[slots >= 0].unsqueeze(1)
    kept = slots[slots >= 0]
    rows = theirs.pool.token_rows(kept // block_size, kept % block_size)
    theirs.pool.write(LAYER, rows, stored, stored)
    tolerance = max(tolerance, 1e-5 if kv_dtype == "float32" else 3e-2)
    torch.testing.assert_close(ours.pool.kv, theirs.pool.kv, rtol=tolerance, atol=tolerance)
    untouched = torch.ones(ours.pool.kv.shape[0] * block_size, dtype=torch.bool, device=device)
    untouched[kept] = False
    found, before = (p.pool.kv[:, 0, LAYER, 0].reshape(-1, width) for p in (ours, theirs))
    assert torch.equal(found[untouched], before[untouched])


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "context_len_max", "wanted"),
    [
        (1, 128, 8192, Splits(64, 64)),  # 128 heads are two tiles
        (1, 16, 128, Splits(2, 2)),
        (200, 128, 4096, Splits(1, 1)),
        (200, 128, 131_072, Splits(8, 1)),  # 16 would be more than 32 * 132 programs
    ],
)
def test_one_program_a_multiprocessor(
    num_seqs: int, num_heads: int, context_len_max: int, wanted: Splits
) -> None:
    assert choose_latent_splits(num_seqs, num_heads, context_len_max, 132) == wanted
