"""Runs zentorch under test: `python engine_zentorch.py MODEL DTYPE THREADS`.

Runs in its own environment (install_zentorch.sh): transformers' model, compiled with zentorch's
backend and frozen weights, with a static KV cache. Sequences of a batch are prefilled together.
"""

from __future__ import annotations

import os
import sys
import time

from engine_turns import redirect, serve

CONTEXT_MAX = 512  # of sequences that decode; a prompt alone may be longer


def main(model_path: str, dtype: str, threads: str) -> None:
    answers = redirect()
    os.environ.update(TORCHINDUCTOR_FREEZING="1", HF_HUB_OFFLINE="1")
    import torch
    import zentorch
    from transformers import AutoModelForCausalLM, StaticCache

    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    compiled = torch.compile(model.forward, backend="zentorch", dynamic=False)

    def run(tokens: torch.Tensor, cache: StaticCache, first: int) -> torch.Tensor:
        """Returns the next tokens [batch, 1] of tokens [batch, length] that begin at `first`."""
        positions = torch.arange(first, first + tokens.shape[1])[None]
        out = compiled(
            input_ids=tokens, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def prefill(prompt: list[int]) -> float:
        cache = StaticCache(config=model.config, max_cache_len=len(prompt) + 1)
        began = time.perf_counter()
        with torch.no_grad():
            run(torch.tensor([prompt]), cache, 0)
        return time.perf_counter() - began

    def decode(prompts: list[list[int]], steps: int) -> float:
        cache = StaticCache(config=model.config, max_cache_len=CONTEXT_MAX)
        with torch.no_grad():
            tokens = run(torch.tensor(prompts), cache, 0)
            began = time.perf_counter()
            for step in range(steps):
                tokens = run(tokens, cache, len(prompts[0]) + step)
            return time.perf_counter() - began

    serve(answers, f"zentorch {zentorch.__version__} {dtype}", prefill, decode)


if __name__ == "__main__":
    main(*sys.argv[1:])
