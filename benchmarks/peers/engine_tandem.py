"""Tandem's engine under test: scheduler, paged KV and sampling, as a worker runs it.

python engine_tandem.py MODEL DTYPE THREADS [WEIGHTS [KERNELS [SPECULATION]]]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.peers.engine_turns import redirect, serve


def main(
    model: str,
    dtype: str,
    threads: str,
    weights: str = "auto",
    kernels: str = "auto",
    speculation: str = "off",
) -> None:
    answers = redirect()
    import torch

    from benchmarks.shared.engines import drained, first_tokens, make_engine, sequence
    from tandem.engine.cache.layout.pool_memory import populate

    torch.set_num_threads(int(threads))
    engine = make_engine(
        model,
        dtype=dtype,
        # In 16 bits, as the peers', whichever numbers the weights' products are computed in.
        kv_dtype="auto" if dtype == "float32" else "bfloat16",
        weights=weights,
        kernels=kernels,
        num_threads=int(threads),
        speculative_config=speculation,
        itl_target_s=0.0,  # prefill is measured alone, and decode after it
    )
    pool = engine._runner.kv
    populate(pool.data_ptr(), pool.nbytes).join()  # as a worker does in its first second
    count = 0

    def add(prompt: list[int], max_tokens: int) -> None:
        nonlocal count
        count += 1
        engine.add(sequence(str(count), prompt, max_tokens))

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
        first_tokens(engine, [str(count - number) for number in range(len(prompts))])
        began = time.perf_counter()
        for _ in range(steps):
            assert len(step()) == len(prompts)
        took = time.perf_counter() - began
        for number in range(len(prompts)):
            engine.remove(str(count - number))
        step()
        return took

    def complete(prompt: list[int], num_tokens: int) -> tuple[float, int, list[int]]:
        add(prompt, num_tokens + 1)
        first_tokens(engine, [str(count)])
        began = time.perf_counter()
        reports = list(drained(engine))
        took = time.perf_counter() - began
        made = [token for each in reports for new in each.new_tokens for token in new.token_ids]
        return took, sum(bool(each.new_tokens) for each in reports), made

    serve(answers, "tandem", prefill, decode, complete)


if __name__ == "__main__":
    main(*sys.argv[1:])
