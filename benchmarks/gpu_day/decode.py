"""Decode steps of a whole engine, host included, against copying as many bytes as they read."""

from __future__ import annotations

import random
import time

from benchmarks.gpu.model import Size, weight_bytes
from benchmarks.gpu_day.model import copy_bytes_per_s, device_of, make_runner, size_of, wait
from benchmarks.gpu_day.parts import add_row
from benchmarks.shared.engines import first_tokens, sequence
from tandem.common.config.engine import EngineConfig
from tandem.engine.engine import Engine

GOAL = 0.8
_STEPS = 64


def run(*, stand_in: bool) -> None:
    size, device = size_of(stand_in=stand_in), device_of(stand_in=stand_in)
    num_steps = 3 if stand_in else _STEPS
    bytes_per_s = copy_bytes_per_s(size, device)
    # One sequence decodes longer: it starts after the steps that give each one its first token.
    context_max = size.step_context + 2 * num_steps + 8
    num_blocks = size.batch * -(-context_max // size.block_size)
    started = time.monotonic()
    options = {
        "num_blocks": num_blocks,
        "max_num_seqs": size.batch,
        "max_model_len": context_max,
        "block_size": size.block_size,
    }
    runner = make_runner(size, device, **options)
    engine = Engine(EngineConfig(model="random", **options), runner, "random")
    print(f"the engine is ready after {time.monotonic() - started:.1f} s")
    for batch in (1, size.batch):
        step_s, context = _measure(engine, size, batch, num_steps)
        wait(device)
        floor_s = (weight_bytes(size) + batch * context * _token_bytes(size)) / bytes_per_s
        add_row(
            f"decode step with host, {batch} x {context} tokens (floor: bytes)",
            ratio=floor_s / step_s,
            goal=None if stand_in else GOAL,
            floor_ms=floor_s * 1e3,
            measured_ms=step_s * 1e3,
        )
    engine.close()


def _token_bytes(size: Size) -> int:
    return 2 * size.kv_heads * size.head_dim * 2 * size.layers


def _measure(engine: Engine, size: Size, batch: int, num_steps: int) -> tuple[float, int]:
    """Returns the mean seconds of a step, and the mean number of tokens that a sequence sees."""
    rng = random.Random(batch)
    names = [f"{batch}-{number}" for number in range(batch)]
    for name in names:
        prompt = [rng.randrange(1, size.vocab) for _ in range(size.step_context)]
        engine.add(sequence(name, prompt, max_tokens=2 * num_steps + 8))
    first_tokens(engine, names)
    for _ in range(2):
        engine.step()
    started = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    took_s = time.perf_counter() - started
    for name in names:
        engine.remove(name)
    while engine.has_work():
        engine.step()
    return took_s / num_steps, size.step_context + num_steps // 2
