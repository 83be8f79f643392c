"""A model with random weights in the shape of Llama 3 8B, in a runner as workers have it.

Nothing is read from disk: the weights are made on the device when the runner loads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton

from benchmarks.gpu.model import LLAMA_3_8B, SMOKE, Size, make_weights, weight_bytes
from tandem.common.config.engine import EngineConfig
from tandem.engine.executor import runner as runner_module
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.weights.decoder_weights import Linear
from tandem.models.folder import ModelFolder

Form = Callable[[torch.Tensor], Linear]  # makes a matrix of the model from bfloat16 numbers


def size_of(*, stand_in: bool) -> Size:
    return SMOKE if stand_in else LLAMA_3_8B


def device_of(*, stand_in: bool) -> torch.device:
    return torch.device("cpu" if stand_in else "cuda")


def config_of(device: torch.device, **options: Any) -> EngineConfig:
    """Returns the settings of an engine, and on a GPU of one with Triton's kernels."""
    is_cuda = device.type == "cuda"
    return EngineConfig(
        model="random",
        device="cuda" if is_cuda else "cpu",
        kernels="triton" if is_cuda else "torch",
        dtype="bfloat16",
        **options,
    )


def make_runner(size: Size, config: EngineConfig, form: Form | None = None) -> ModelRunner:
    """Returns a runner whose pool is not allocated yet. `form` gives the matrices of the layers
    another form than bfloat16."""
    shape = make_weights(size, torch.device("meta"))[0]
    files = (Path("random.safetensors"),)
    num_weights = weight_bytes(size) // 2 + size.vocab * size.hidden
    folder = ModelFolder(Path("random"), shape, "random", "random", files, num_weights)

    def load(*_: object, **__: object) -> object:
        return make_weights(size, torch.device(config.device), form)[1]

    with patch.object(runner_module, "load_weights", load):
        return ModelRunner(folder, config)


def copy_bytes_per_s(size: Size, device: torch.device) -> float:
    """Returns the rate of a copy on the device, in bytes read and written."""
    source = torch.ones(size.copy_bytes // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    rate = 2 * size.copy_bytes / seconds(lambda: target.copy_(source), device)
    print(f"a copy moves {rate / 1e9:,.1f} GB/s, read and written")
    return rate


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of one call on the device."""
    if device.type == "cuda":
        return float(triton.testing.do_bench(run, warmup=50, rep=300, return_mode="median")) / 1e3
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
