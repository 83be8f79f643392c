"""Measures what a JSON schema costs a decode step, at batch 1, 8 and 32.

    python -m benchmarks.engine.structured [--model smollm2] [--tokens 48] [--repeats 3]
        [--forced-max 0]

Each batch runs with and without the schema in turn; the fastest of the repeats counts.
"""

import json
import time
from functools import partial

from tandem import LLM, SamplingParams, StructuredOutputsParams
from tandem.common.config.engine import EngineConfig
from tandem_bench.framework import in_turn, options, run_main

FIRST = 100  # second token of the first prompt
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 100,
}


@options
class Options:
    model: str = "smollm2"
    tokens: int = 48
    """Tokens of each answer."""
    repeats: int = 3
    threads: int = 1
    forced_max: int = EngineConfig(model="").forced_max
    """Largest number of tokens that the grammar forces in one step."""


def tokens_per_s(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Returns the speed of decode, from when all sequences have their first token."""
    num_tokens, begun, started = dict.fromkeys(range(len(prompts)), 0), 0, 0.0
    for output in llm.generate_stream(prompts, params):
        num_tokens[output.prompt_token_ids[1] - FIRST] = len(output.outputs[0].token_ids)
        if not started and all(num_tokens.values()):
            started, begun = time.perf_counter(), sum(num_tokens.values())
    return (sum(num_tokens.values()) - begun) / (time.perf_counter() - started)


def main(options: Options = Options()) -> None:
    """Prints a line for each batch."""
    llm = LLM(
        options.model,
        device="cpu",
        num_threads=options.threads,
        num_blocks=1024,
        itl_target_s=0.0,
        forced_max=options.forced_max,
    )
    form = StructuredOutputsParams(json=json.dumps(SCHEMA))
    ways = {"without": None, "with": form}
    for batch in (1, 8, 32):
        prompts = [[1, FIRST + place, *range(200, 230)] for place in range(batch)]
        taken = in_turn(
            {
                name: partial(
                    tokens_per_s,
                    llm,
                    prompts,
                    SamplingParams(
                        temperature=0, max_tokens=options.tokens, structured_outputs=each
                    ),
                )
                for name, each in ways.items()
            },
            options.repeats,
        )
        without, with_schema = (max(found) for found in taken.values())
        print(
            f"batch {batch}: {without:.1f} tokens/s without, {with_schema:.1f} with the schema, "
            f"ratio {with_schema / without:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    run_main(main)
