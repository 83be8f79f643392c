"""Measures what a JSON schema costs a decode step, at batch 1, 8 and 32.

    python -m benchmarks.engine.structured [--model smollm2] [--tokens 48] [--repeats 3]
        [--forced-max 0]

Each batch runs with and without the schema in turn; the fastest of the repeats counts.
"""

import json
import time
from functools import partial
from itertools import count

from benchmarks.shared.engines import drained, first_tokens, make_engine, sequence
from tandem.common.config.engine import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.types import SequenceSpec
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem_bench.framework import in_turn, options, run_main

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


def tokens_per_s(engine: Engine, specs: list[SequenceSpec]) -> float:
    """Returns the speed of decode, from when all sequences have their first token."""
    for spec in specs:
        engine.add(spec)
    while engine.awaits_threads():
        time.sleep(0.001)
    first_tokens(engine, [spec.sequence_id for spec in specs])
    started = time.perf_counter()
    num_tokens = sum(len(new.token_ids) for r in drained(engine) for new in r.new_tokens)
    return num_tokens / (time.perf_counter() - started)


def main(options: Options = Options()) -> None:
    """Prints a line for each batch."""
    engine = make_engine(
        options.model,
        num_threads=options.threads,
        num_blocks=1024,
        itl_target_s=0.0,
        forced_max=options.forced_max,
    )
    grammar = grammar_text(StructuredOutput("schema", "json_schema", json.dumps(SCHEMA)))
    names = count()

    def take_turn(batch: int, text: str) -> float:
        prompts = [[1, 100 + place, *range(200, 230)] for place in range(batch)]
        specs = [
            sequence(str(next(names)), prompt, options.tokens, grammar=text) for prompt in prompts
        ]
        return tokens_per_s(engine, specs)

    for batch in (1, 8, 32):
        ways = {
            "without": partial(take_turn, batch, ""),
            "with": partial(take_turn, batch, grammar),
        }
        without, with_schema = (
            max(taken) for taken in in_turn(ways, options.repeats, warm_up=0).values()
        )
        print(
            f"batch {batch}: {without:.1f} tokens/s without, {with_schema:.1f} with the schema, "
            f"ratio {with_schema / without:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    run_main(main)
