"""Copies of blocks to and from the tier in host memory, against one copy of as many bytes."""

from __future__ import annotations

import torch

from benchmarks.gpu.kernels import Bench
from benchmarks.gpu.tiers import measure_copies
from benchmarks.gpu_day.model import device_of, size_of
from benchmarks.gpu_day.parts import add_row
from tandem.engine.cache.layout.block_layout import BlockLayout

GOAL = 0.85


def run(*, stand_in: bool) -> None:
    size, device = size_of(stand_in=stand_in), device_of(stand_in=stand_in)
    bench = Bench(size, device, lambda row: add_row(**row))
    num_blocks = 2 * -(-size.chunks[-1] // size.block_size)
    layout = BlockLayout(
        num_blocks, size.kv_heads, size.layers, size.block_size, size.head_dim, "bfloat16"
    )
    shape = (num_blocks, layout.block_bytes)
    memory = torch.zeros(shape, dtype=torch.uint8, device=device)
    measure_copies(bench, memory, None if stand_in else GOAL)
