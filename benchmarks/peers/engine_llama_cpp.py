"""Runs llama.cpp under test: `python engine_llama_cpp.py GGUF THREADS [FORMAT [DRAFTS]]`.

Runs in its own environment (install_llama_cpp.sh). With a FORMAT (BF16, Q8_0, Q4_1) the GGUF is
rewritten to it once, into ~/.cache/tandem/peers/gguf, by llama.cpp's own quantizer. With DRAFTS,
`complete` verifies so many tokens in a step, found by prompt lookup: the tokens after the last
place where the last 4, 3 or 2 tokens occurred. llama.cpp's example `lookup` does so in C++; here
the search is a dictionary in Python, whose time is small beside that of a step.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import llama_cpp as llama
import numpy as np
from engine_turns import redirect, serve

FORMATS = {
    "BF16": llama.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_1": llama.LLAMA_FTYPE_MOSTLY_Q4_1,
}
STEP_TOKENS = 512
NGRAMS = (4, 3, 2)  # numbers of last tokens that are looked up, the longest first


def main(file: str, threads: str, wanted: str = "", drafts: str = "0") -> None:
    answers = redirect()
    llama.llama_backend_init()
    path = rewritten(Path(file), wanted) if wanted else Path(file)
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 32 * 512, STEP_TOKENS, STEP_TOKENS
    params.n_seq_max, params.kv_unified = 32, True
    params.n_threads = params.n_threads_batch = int(threads)
    context = llama.llama_init_from_model(model, params)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(STEP_TOKENS, 0, 1)

    def run(tokens: list[tuple[int, int, int, bool]]) -> None:
        """Decodes tokens, each (token, position, sequence, whether its logits are wanted)."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wants) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    def best(row: int) -> int:
        logits = llama.llama_get_logits_ith(context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (vocabulary,)).argmax())

    def compute(prompt: list[int], sequence: int) -> int:
        for first in range(0, len(prompt), STEP_TOKENS):
            part = prompt[first : first + STEP_TOKENS]
            last = first + len(part) == len(prompt)
            run(
                [
                    (token, first + i, sequence, last and i == len(part) - 1)
                    for i, token in enumerate(part)
                ]
            )
        return best(-1)

    def forget() -> None:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)

    def prefill(prompt: list[int]) -> float:
        forget()
        began = time.perf_counter()
        compute(prompt, 0)
        return time.perf_counter() - began

    def decode(prompts: list[list[int]], steps: int) -> float:
        forget()
        tokens = [compute(prompt, sequence) for sequence, prompt in enumerate(prompts)]
        began = time.perf_counter()
        for n in range(steps):
            rows = [(t, len(prompts[s]) + n, s, True) for s, t in enumerate(tokens)]
            run(rows)
            tokens = [best(row) for row in range(len(rows))]
        return time.perf_counter() - began

    def complete(prompt: list[int], num_tokens: int) -> tuple[float, int, list[int]]:
        forget()
        tokens = [*prompt, compute(prompt, 0)]
        lookup = Lookup(int(drafts))
        end = len(tokens) + num_tokens
        began = time.perf_counter()
        num_steps = 0
        while len(tokens) < end:
            start = len(tokens) - 1  # of the step: the last token is not computed yet
            proposed = lookup.propose(tokens)[: end - len(tokens) - 1]
            rows = [tokens[-1], *proposed]
            run([(token, start + i, 0, True) for i, token in enumerate(rows)])
            num_steps += 1
            for row in range(len(rows)):
                tokens.append(best(row))
                if row < len(proposed) and tokens[-1] != proposed[row]:
                    break
            # Rejected tokens leave the cache. The last one is not in it yet.
            memory = llama.llama_get_memory(context)
            llama.llama_memory_seq_rm(memory, 0, len(tokens) - 1, -1)
        took = time.perf_counter() - began
        return took, num_steps, tokens[len(prompt) + 1 :]

    name = f"llama.cpp {wanted or path.name} ({llama.__version__})"
    serve(answers, name, prefill, decode, complete)


class Lookup:
    """Finds the tokens that followed the last tokens of a list that only grows where these occurred
    before."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._after: dict[tuple[int, ...], int] = {}  # run of tokens -> position after its last one
        self._num_known = 0

    def propose(self, tokens: list[int]) -> list[int]:
        if not self._num_drafts:
            return []
        for end in range(self._num_known, len(tokens)):
            for size in NGRAMS:
                if end >= size:
                    self._after[tuple(tokens[end - size : end])] = end
        self._num_known = len(tokens)
        for size in NGRAMS:
            if (at := self._after.get(tuple(tokens[-size:]))) is not None:
                return tokens[at : at + self._num_drafts]
        return []


def rewritten(file: Path, wanted: str) -> Path:
    target = Path.home() / ".cache/tandem/peers/gguf" / f"{file.stem}-as-{wanted.lower()}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        params = llama.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = FORMATS[wanted], True
        part = target.with_suffix(".part")
        if llama.llama_model_quantize(str(file).encode(), str(part).encode(), params):
            raise RuntimeError(f"llama.cpp could not write {wanted}")
        part.rename(target)
    return target


if __name__ == "__main__":
    main(*sys.argv[1:])
