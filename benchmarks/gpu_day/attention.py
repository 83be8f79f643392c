"""Prefill attention over one layer's paged KV, against cuDNN's attention over contiguous KV."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.model import Size
from benchmarks.gpu_day.model import device_of, seconds, size_of
from benchmarks.gpu_day.parts import add_row
from tandem_kernels.triton.prefill_attention import prefill_attention

GOAL = 0.9


@torch.inference_mode()
def run(*, stand_in: bool) -> None:
    size, device = size_of(stand_in=stand_in), device_of(stand_in=stand_in)
    num_tokens = size.attention_context
    ours_s = seconds(_ours(size, device), device)
    cudnn_s = seconds(_cudnn(size, device), device)
    flop = 2 * num_tokens**2 * size.heads * size.head_dim
    add_row(
        f"prefill attention, {num_tokens} tokens (floor: cuDNN)",
        ratio=cudnn_s / ours_s,
        goal=None if stand_in else GOAL,
        floor_ms=cudnn_s * 1e3,
        measured_ms=ours_s * 1e3,
        tflop_per_s=flop / ours_s / 1e12,
    )


def _ours(size: Size, device: torch.device) -> Callable[[], object]:
    num_tokens = size.attention_context
    num_blocks = -(-num_tokens // size.block_size)
    shape = (num_blocks, size.kv_heads, 2, size.block_size, size.head_dim)
    kv = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    table = torch.randperm(num_blocks, device=device).to(torch.int32)[None]
    lens = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    chunk = torch.randn(num_tokens, size.heads, size.head_dim, dtype=torch.bfloat16, device=device)
    return lambda: prefill_attention(chunk, kv, table, lens, starts)


def _cudnn(size: Size, device: torch.device) -> Callable[[], object]:
    """Returns a call of cuDNN's attention; on a CPU, of torch's own."""
    shapes = (size.heads, size.kv_heads, size.kv_heads)
    q, k, v = (
        torch.randn(
            1, heads, size.attention_context, size.head_dim, dtype=torch.bfloat16, device=device
        )
        for heads in shapes
    )
    group = size.heads // size.kv_heads
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    backend = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend
