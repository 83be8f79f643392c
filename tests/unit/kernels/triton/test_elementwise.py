"""Norm, activation, and the rotation with its cache write, each against its torch reference."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem_kernels import norm, rope
from tandem_kernels.kv_cache import make_pool
from tandem_kernels.kv_fp8 import FixedScales
from tandem_kernels.triton.activation import gated_mul, relu_squared
from tandem_kernels.triton.norm import add_rms_norm, rms_norm
from tandem_kernels.triton.rope_cache import rotate_and_store
from tests.kv_pools import empty_pool, pool_of

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 8), (3, 576), (7, 1000), (0, 64)])
def test_norm(num_rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x = randn(num_rows, hidden, dtype=dtype, device=device)
    delta = randn(num_rows, hidden + 5, dtype=dtype, device=device, seed=1)[:, :hidden]
    weight = randn(hidden, dtype=dtype, device=device, seed=2)
    assert_close(rms_norm(x, weight, EPS), norm.rms_norm(x, weight, EPS))
    wide = weight.float()  # is not rounded in between
    assert_close(rms_norm(x, wide, EPS), norm.rms_norm(x, wide, EPS))
    total = x + delta
    assert_close(add_rms_norm(x, delta, weight, EPS), norm.rms_norm(total, weight, EPS))
    assert_close(x, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [8, 576])
def test_norms_around_an_addition(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x, delta = (randn(3, hidden, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight, of_delta = (randn(hidden, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    total = x + norm.rms_norm(delta, of_delta, EPS) * 0.22
    sum_alone = x.clone()
    more = {"delta_weight": of_delta, "delta_multiplier": 0.22}
    assert_close(add_rms_norm(x, delta, weight, EPS, **more), norm.rms_norm(total, weight, EPS))
    assert_close(x, total)
    assert add_rms_norm(sum_alone, delta, None, EPS, **more) is sum_alone
    assert_close(sum_alone, total)


def test_norm_of_some_columns_in_place(device: torch.device) -> None:
    x = randn(3, 20, dtype=torch.float32, device=device)
    before = x.clone()
    weight = randn(8, dtype=torch.float32, device=device, seed=2)
    rms_norm(x[:, 5:13], weight, EPS, out=x[:, 5:13])
    assert_close(x[:, 5:13], norm.rms_norm(before[:, 5:13], weight, EPS))
    assert torch.equal(x[:, :5], before[:, :5])
    assert torch.equal(x[:, 13:], before[:, 13:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "inner"), [(1, 4), (5, 1024), (2, 1537)])
def test_activation(num_rows: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = 4 * randn(num_rows, 2 * inner, dtype=dtype, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(gated_mul(gate_up), silu(gate) * up)
    assert_close(gated_mul(gate_up, "gelu_tanh"), gelu(gate, approximate="tanh") * up)
    assert_close(gated_mul(gate_up, factors=(0.6, 1.7)), silu(gate * 0.6) * up * 1.7)
    assert_close(relu_squared(gate), relu(gate).square())


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(1, 1, 8, 16), (6, 2, 64, 8), (7, 1, 80, 24), (9, 3, 96, 16), (4, 4, 128, 64), (8, 1, 256, 8)],
)
@pytest.mark.parametrize("norm_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_and_cache_write(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    norm_dtype: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    num_blocks, layers, layer = 4, 2, 1
    slots = [3 * block_size + 5, -1, 0, 2 * block_size - 1, block_size]
    num_tokens, heads = len(slots), num_heads + 2 * num_kv_heads
    kv = randn(
        num_blocks, num_kv_heads, layers, 2, block_size, head_dim, dtype=dtype, device=device
    )
    expected_kv = kv.clone()
    qkv = randn(num_tokens, heads * head_dim, dtype=dtype, device=device, seed=1)
    norms = [
        randn(head_dim, dtype=norm_dtype or dtype, device=device, seed=seed) for seed in (2, 3)
    ]
    if dtype == torch.float32 and norm_dtype == torch.bfloat16:
        pytest.skip("weights of norms are of the dtype of rows, or fp32")
    positions = torch.tensor([5, 0, 300, 7, 99999], device=device)
    frequencies = rope.rotary_frequencies(head_dim, 10_000.0).to(device)
    angles = rope.rotary_angles(positions, frequencies, 1.1)

    queries = rotate_and_store(
        qkv,
        angles,
        torch.tensor(slots, device=device),
        pool_of(kv).layer(layer).numbers,
        num_heads=num_heads,
        q_norm=norms[0] if norm_dtype else None,
        k_norm=norms[1] if norm_dtype else None,
        eps=EPS,
    )

    split = qkv.view(num_tokens, heads, head_dim)
    q, k, v = split.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norm_dtype:
        q, k = norm.rms_norm(q, norms[0], EPS), norm.rms_norm(k, norms[1], EPS)
    assert_close(queries, rope.rotate(q, angles))
    stored = torch.tensor([slot >= 0 for slot in slots], device=device)
    kept = torch.tensor([slot for slot in slots if slot >= 0], device=device)
    pool = pool_of(expected_kv)
    rows = pool.token_rows(kept // block_size, kept % block_size)
    pool.write(layer, rows, rope.rotate(k, angles)[stored], v[stored])
    assert_close(kv, expected_kv)


@pytest.mark.parametrize(
    ("dtype", "positions"),
    [  # at position 0 nothing is rounded: the interpreter rounds bfloat16 in another way
        (torch.float32, [5, 0, 300, 7, 99999, 3, 1]),
        (torch.float32, [0] * 7),
        (torch.bfloat16, [0] * 7),
    ],
)
@pytest.mark.parametrize(
    ("kv_dtype", "fixed"), [("int8", None), ("fp8_e4m3", None), ("fp8_e4m3", (0.002, 0.7))]
)
def test_a_quantized_pool_gets_the_references_bytes(
    kv_dtype: str,
    fixed: tuple[float, float] | None,
    dtype: torch.dtype,
    positions: list[int],
    device: torch.device,
) -> None:
    """Rows of ordinary size, of scales below float16's normal numbers, large, zeros, and rows with
    a number that is not finite."""
    if any(positions) and device.type == "cuda":
        pytest.skip("compiled, products and sums are fused")
    num_heads, num_kv_heads, head_dim, block_size, layer = 7, 3, 80, 12, 1
    slots = torch.tensor([41, -1, 0, 23, 12, 7, 8], device=device)
    sizes = torch.tensor([1.0, 1.0, 1e-4, 1e4, 1e-7, 0.0, 3.0], device=device).view(-1, 1, 1)
    heads = num_heads + 2 * num_kv_heads
    qkv = randn(len(slots), heads, head_dim, dtype=torch.float32, device=device) * sizes
    qkv[6, num_heads, 3], qkv[6, num_heads + 4, 70] = torch.inf, torch.nan
    qkv = qkv.to(dtype)
    layout = BlockLayout(4, num_kv_heads, 2, block_size, head_dim, kv_dtype)
    scales_of_layers = torch.tensor([(1.0, 1.0), fixed or (1.0, 1.0)], dtype=torch.float16)
    static = FixedScales(scales_of_layers.to(device)) if fixed else None
    ours, theirs = (make_pool(empty_pool(layout, device).memory, layout, static) for _ in range(2))
    frequencies = rope.rotary_frequencies(head_dim, 10_000.0).to(device)
    angles = rope.rotary_angles(torch.tensor(positions, device=device), frequencies, 1.0)
    numbers, scales, fixed_scales = ours.layer(layer)
    rotate_and_store(
        qkv.flatten(1),
        angles,
        slots,
        numbers,
        num_heads=num_heads,
        scales=scales,
        fixed_scales=fixed_scales,
    )
    _, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    kept = slots >= 0
    rows = theirs.token_rows(slots[kept] // block_size, slots[kept] % block_size)
    theirs.write(layer, rows, rope.rotate(k, angles)[kept], v[kept])
    assert torch.equal(ours.memory, theirs.memory)
    assert int(theirs.memory.count_nonzero()) > 3 * 2 * num_kv_heads * head_dim * 0.8
