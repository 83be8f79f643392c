"""Decode at batch 1 with weights in fp8 and int4, against their bytes and against bfloat16."""

from __future__ import annotations

import gc

import torch

from benchmarks.gpu.model import Size, weight_bytes
from benchmarks.gpu_day.model import (
    Form,
    config_of,
    copy_bytes_per_s,
    device_of,
    make_runner,
    seconds,
    size_of,
    wait,
)
from benchmarks.gpu_day.parts import add_row
from tandem.engine.executor.weights.decoder_weights import Linear
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.checkpoint.quantized.fp8 import RUN, Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups

FP8_GOAL = 0.8  # share of the rate at which a copy would move the bytes
INT4_GOAL = 2.5  # times the speed of bfloat16
_GROUP = 128  # inputs that share a scale, as in most files of AWQ and GPTQ
_CONTEXT = 128


def run(*, stand_in: bool) -> None:
    size, device = size_of(stand_in=stand_in), device_of(stand_in=stand_in)
    bytes_per_s = copy_bytes_per_s(size, device)
    bf16_s = _step_s(size, device, None)
    output_bytes = 2 * size.vocab * size.hidden  # the output matrix stays in bfloat16
    layer_bytes = weight_bytes(size) - output_bytes
    rows = {
        "bfloat16": (bf16_s, layer_bytes, None),
        "fp8, a scale for 128 x 128 weights": (
            _step_s(size, device, _fp8),
            layer_bytes / 2,
            FP8_GOAL,
        ),
    }
    for name, (step_s, num_bytes, goal) in rows.items():
        floor_s = (num_bytes + output_bytes) / bytes_per_s
        add_row(
            f"decode step, 1 x {_context(size)}, {name} (floor: bytes)",
            ratio=floor_s / step_s,
            goal=None if stand_in else goal,
            floor_ms=floor_s * 1e3,
            measured_ms=step_s * 1e3,
        )
    int4_s = _step_s(size, device, _int4)
    add_row(
        f"decode step, 1 x {_context(size)}, int4, times the speed of bfloat16",
        ratio=bf16_s / int4_s,
        goal=None if stand_in else INT4_GOAL,
        measured_ms=int4_s * 1e3,
    )


def _context(size: Size) -> int:
    return min(_CONTEXT, size.step_context)


def _step_s(size: Size, device: torch.device, form: Form | None) -> float:
    """Returns the seconds of a forward pass for one token. The memory of the model before is freed
    first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    num_blocks = -(-2 * _context(size) // size.block_size)
    config = config_of(
        device,
        num_blocks=num_blocks,
        max_num_seqs=1,
        max_model_len=2 * _context(size),
        block_size=size.block_size,
    )
    runner = make_runner(size, config, form)
    runner.allocate(num_blocks)
    batch = StepBatch([SequenceSlice([7], _context(size), list(range(num_blocks)), True)])
    runner.forward(batch)
    wait(device)
    step_s = seconds(lambda: runner.forward(batch), device)
    wait(device)
    runner.close()
    return step_s


def _fp8(matrix: torch.Tensor) -> Linear:
    data = matrix.to(torch.float8_e4m3fn)
    num_runs = -(-matrix.shape[1] // RUN)
    scales = torch.ones(num_runs, len(matrix), dtype=torch.float32, device=matrix.device).t()
    return _without_weight(matrix, Fp8(data, scales))


def _int4(matrix: torch.Tensor) -> Linear:
    """Numbers from 0 to 15 with zero points of 8, as AWQ and GPTQ have them."""
    shape, device = matrix.shape, matrix.device
    numbers = torch.randint(0, 16, shape, dtype=torch.uint8, device=device)
    num_groups = max(1, shape[1] // _GROUP)
    scale = (shape[1] ** -0.5) / 4
    scales = torch.full((shape[0], num_groups), scale, dtype=torch.float16, device=device)
    zeros = torch.full((shape[0], num_groups), 8, dtype=torch.uint8, device=device)
    packed = PackedGroups.of(numbers, scales, zeros)
    assert packed is not None
    return _without_weight(matrix, packed)


def _without_weight(matrix: torch.Tensor, blocks: Fp8 | PackedGroups) -> Linear:
    return Linear(torch.empty(matrix.shape, dtype=matrix.dtype, device="meta"), None, blocks)
