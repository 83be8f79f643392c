"""Prompts of a tiny random model, and the answers of one engine to each prompt alone.

The model has random weights and 203 tokens, so that any change of a prompt's token or of the seed
changes the answer from its first or second token on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tandem import LLM, SamplingParams
from tests.chaos.load import Prompt
from tests.tiny_models import make_tiny_model

ANSWER = 48  # tokens of a long answer
PREFIX_MAX = 320
REST_MAX = 100
_VOCABULARY = range(3, 203)


def reference_prompts(
    folder: Path, rng: Random, num_prefixes: int, num_each: int
) -> tuple[str, list[Prompt]]:
    """Creates the model in `folder`. Returns the value of `--model`, and prompts with their
    answers.

    `num_each` prompts share each prefix: a third is greedy, a third is greedy with a repetition
    penalty, and a third is sampled with its own seed.
    """
    make_tiny_model("llama", folder, max_position_embeddings=1024)
    known = []
    with LLM(
        folder, device="cpu", numerics="invariant", num_gpu_blocks_override=64, num_threads=1
    ) as llm:
        for number, tokens in enumerate(_prompts(rng, num_prefixes, num_each)):
            sampling = _sampling(rng, number)
            params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, **sampling)
            [output] = llm.generate(tokens, params)
            known.append(Prompt(tokens, output.outputs[0].token_ids, sampling))
    return str(folder), known


def _prompts(rng: Random, num_prefixes: int, num_each: int) -> Iterator[list[int]]:
    for _ in range(num_prefixes):
        prefix = rng.choices(_VOCABULARY, k=rng.randint(0, PREFIX_MAX))
        for _ in range(num_each):
            yield prefix + rng.choices(_VOCABULARY, k=rng.randint(1, REST_MAX))


def _sampling(rng: Random, number: int) -> dict[str, Any]:
    if number % 3 == 0:
        return {"temperature": 0}
    if number % 3 == 1:
        return {"temperature": 0, "repetition_penalty": 1.5}
    return {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(1 << 31)}
