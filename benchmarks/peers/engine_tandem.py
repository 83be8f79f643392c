"""Tandem's engine under test: scheduler, paged KV and sampling, as a worker runs it.

python engine_tandem.py MODEL DTYPE THREADS [WEIGHTS [KERNELS]]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.engine_turns import redirect, serve


def main(
    model: str, dtype: str, threads: str, weights: str = "auto", kernels: str = "auto"
) -> None:
    answers = redirect()
    import torch

    from tandem.common.config.engine import EngineConfig
    from tandem.common.sampling_params import SamplingParams
    from tandem.engine.cache.layout.pool_memory import populate
    from tandem.engine.engine import Engine
    from tandem.engine.executor.runner import ModelRunner
    from tandem.engine.types import Mode, SequenceSpec
    from tandem.models.source import resolve

    torch.set_num_threads(int(threads))
    config = EngineConfig(
        model=model,
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]
        # In 16 bits, as the peers', whichever numbers the weights' products are computed in.
        kv_dtype="auto" if dtype == "float32" else "bfloat16",
        weights=weights,  # type: ignore[arg-type]
        kernels=kernels,  # type: ignore[arg-type]
        num_threads=int(threads),
        itl_target_s=0.0,  # prefill is measured alone, and decode after it
    )
    folder = resolve(model)
    runner = ModelRunner(folder, config)
    engine = Engine(config, runner, folder.fingerprint)
    populate(runner.kv.data_ptr(), runner.kv.nbytes).join()  # as a worker does in its first second
    count = 0

    def add(prompt: list[int], max_tokens: int) -> None:
        nonlocal count
        count += 1
        spec = SequenceSpec(
            str(count),
            prompt,
            len(prompt),
            Mode.LOCAL,
            SamplingParams(temperature=0, max_tokens=max_tokens),
        )
        engine.add(spec)

    def step() -> list[Any]:
        return engine.step().new_tokens

    def prefill(prompt: list[int]) -> float:
        began = time.perf_counter()
        add(prompt, 1)
        while not step():
            pass
        return time.perf_counter() - began

    def decode(prompts: list[list[int]], steps: int) -> float:
        for prompt in prompts:
            add(prompt, 1_000)
        first: set[str] = set()
        while len(first) < len(prompts):
            first |= {each.sequence_id for each in step()}
        began = time.perf_counter()
        for _ in range(steps):
            assert len(step()) == len(prompts)
        took = time.perf_counter() - began
        for number in range(len(prompts)):
            engine.remove(str(count - number))
        step()
        return took

    serve(answers, "tandem", prefill, decode)


if __name__ == "__main__":
    main(*sys.argv[1:])
