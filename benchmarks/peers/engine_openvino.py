"""Runs OpenVINO GenAI under test: `python engine_openvino.py GGUF THREADS PRECISION`.

Runs in its own environment (install_openvino.sh), with the pipeline that batches requests. It reads
the GGUF itself, makes a model of its own of it, and computes with the weights as they are. The
PRECISION is that of activations and KV: bf16 or f32. Products with quantized weights quantize
activations as OpenVINO does by default.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from engine_turns import redirect, serve

NUM_BLOCKS = 32 * 512 // 32  # the contexts of all sequences, in blocks of 32 tokens
STEP_TOKENS = 512


def main(file: str, threads: str, precision: str) -> None:
    answers = redirect()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = NUM_BLOCKS
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.max_num_seqs = 32
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_NUM_THREADS": int(threads),
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(file, scheduler, "CPU", properties)
    ids = itertools.count()

    def add(prompt: list[int], max_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        tokens = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return pipeline.add_request(next(ids), tokens, config)

    def step_until_first(handles: list[Any]) -> None:
        waiting = list(handles)
        while waiting:
            pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]

    def end(handles: list[Any]) -> None:
        for handle in handles:
            handle.cancel()
        while pipeline.has_non_finished_requests():
            pipeline.step()

    def prefill(prompt: list[int]) -> float:
        began = time.perf_counter()
        handle = add(prompt, 2)
        step_until_first([handle])
        took = time.perf_counter() - began
        end([handle])
        return took

    def decode(prompts: list[list[int]], steps: int) -> float:
        handles = [add(prompt, steps + 10) for prompt in prompts]
        step_until_first(handles)
        began = time.perf_counter()
        for _ in range(steps):
            pipeline.step()
        took = time.perf_counter() - began
        end(handles)
        return took

    serve(answers, f"OpenVINO GenAI {openvino_genai.__version__}", prefill, decode)


if __name__ == "__main__":
    main(*sys.argv[1:])
