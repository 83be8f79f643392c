"""Decode steps of a whole engine, host included, against copying as many bytes as they read."""

from __future__ import annotations

import random
import time
from collections import Counter

from benchmarks.gpu.model import Size, weight_bytes
from benchmarks.gpu_day.model import config_of, copy_bytes_per_s, device_of, make_runner, size_of
from benchmarks.gpu_day.parts import add_row
from benchmarks.shared.engines import sequence
from tandem.engine.engine import Engine

GOAL = 0.8
_STEPS = 64


def run(*, stand_in: bool) -> None:
    size, device = size_of(stand_in=stand_in), device_of(stand_in=stand_in)
    num_steps = 3 if stand_in else _STEPS
    bytes_per_s = copy_bytes_per_s(size, device)
    # The first sequences decode while the last ones are prefilled, some steps for each of them.
    max_tokens = num_steps + 8 * size.batch
    context_max = size.step_context + max_tokens
    config = config_of(
        device,
        num_blocks=size.batch * -(-context_max // size.block_size),
        max_num_seqs=size.batch,
        max_model_len=context_max,
        block_size=size.block_size,
    )
    started = time.monotonic()
    engine = Engine(config, make_runner(size, config), "random")
    print(f"the engine is ready after {time.monotonic() - started:.1f} s", flush=True)
    token_bytes = 2 * size.kv_heads * size.head_dim * 2 * size.layers
    for batch in (1, size.batch):
        step_s, num_tokens = _measure(engine, size, batch, num_steps, max_tokens)
        floor_s = (weight_bytes(size) + num_tokens * token_bytes) / bytes_per_s
        add_row(
            f"decode step with host, {batch} x {num_tokens / batch:,.0f} tokens (floor: bytes)",
            ratio=floor_s / step_s,
            goal=None if stand_in else GOAL,
            floor_ms=floor_s * 1e3,
            measured_ms=step_s * 1e3,
        )
    engine.close()


def _measure(
    engine: Engine, size: Size, batch: int, num_steps: int, max_tokens: int
) -> tuple[float, float]:
    """Returns the mean seconds of a step, and the mean number of tokens that all sequences see."""
    rng = random.Random(batch)
    names = [f"{batch}-{number}" for number in range(batch)]
    for name in names:
        prompt = [rng.randrange(1, size.vocab) for _ in range(size.step_context)]
        engine.add(sequence(name, prompt, max_tokens=max_tokens))
    made: Counter[str] = Counter()

    def step() -> None:
        for new in engine.step().new_tokens:
            made[new.sequence_id] += len(new.token_ids)

    while len(made) < batch:
        step()
    for _ in range(2):
        step()
    before = made.total()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    took_s = time.perf_counter() - started
    if made.total() - before != batch * num_steps:
        raise RuntimeError("a sequence did not decode in each step")
    for name in names:
        engine.remove(name)
    while engine.has_work():
        engine.step()
    num_tokens = batch * size.step_context + (before + made.total()) / 2
    return took_s / num_steps, num_tokens
