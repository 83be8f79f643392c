"""The configurations that tuning chooses on this card, as a worker's start does it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu_day.model import config_of, device_of, make_runner, size_of
from benchmarks.gpu_day.parts import add_row
from tandem_kernels.triton.tuning import choices


def run(*, stand_in: bool) -> None:
    size, device = size_of(stand_in=stand_in), device_of(stand_in=stand_in)
    size = replace(size, layers=2)  # tuning depends on the shapes of layers, not on their number
    num_blocks = size.batch * -(-size.step_context // size.block_size)
    config = config_of(
        device,
        max_model_len=size.step_context,
        block_size=size.block_size,
        num_blocks=num_blocks,
        max_num_seqs=size.batch,
    )
    runner = make_runner(size, config)
    runner.allocate(num_blocks)
    runner.close()
    chosen = {kernel: configs for kernel, configs in choices().items() if configs}
    for kernel, configs in chosen.items():
        add_row(kernel, configs=configs)
    add_row(f"{len(chosen)} kernels have chosen configurations")
