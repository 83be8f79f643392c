"""Measures what a JSON schema costs a decode step, at batch 1, 8 and 32.

    .venv/bin/python benchmarks/structured.py [--model smollm2] [--tokens 48] [--repeats 3]
        [--forced-max 0]

Each batch runs with and without the schema in turn; the fastest of the repeats counts.
"""

import argparse
import json
import time
from itertools import count

from tandem.common.config.engine import EngineConfig
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode, SequenceSpec
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem.models.source import resolve

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


def tokens_per_s(engine: Engine, specs: list[SequenceSpec]) -> float:
    """Returns the speed of decode, from when all sequences have their first token."""
    for spec in specs:
        engine.add(spec)
    while engine.awaits_threads():
        time.sleep(0.001)
    begun: set[str] = set()
    while len(begun) < len(specs):
        begun.update(new.sequence_id for new in engine.step().new_tokens)
    started, num_tokens = time.perf_counter(), 0
    while engine.has_work():
        num_tokens += sum(len(new.token_ids) for new in engine.step().new_tokens)
    return num_tokens / (time.perf_counter() - started)


def main() -> None:
    """Prints a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--forced-max", type=int, default=EngineConfig(model="").forced_max)
    asked = parser.parse_args()
    folder = resolve(asked.model)
    config = EngineConfig(
        model=asked.model,
        num_threads=asked.threads,
        num_blocks=1024,
        itl_target_s=0.0,
        forced_max=asked.forced_max,
    )
    compiler = GrammarCompiler.of(folder)
    engine = Engine(config, ModelRunner(folder, config), folder.fingerprint, compiler)
    grammar = grammar_text(StructuredOutput("schema", "json_schema", json.dumps(SCHEMA)))
    numbers = count()
    for batch in (1, 8, 32):
        best = {"": 0.0, grammar: 0.0}
        for _ in range(asked.repeats):
            for text in best:
                specs = [
                    SequenceSpec(
                        sequence_id=str(next(numbers)),
                        token_ids=[1, 100 + place, *range(200, 230)],
                        num_prompt_tokens=32,
                        mode=Mode.LOCAL,
                        sampling=SamplingParams(temperature=0, max_tokens=asked.tokens),
                        grammar=text,
                    )
                    for place in range(batch)
                ]
                best[text] = max(best[text], tokens_per_s(engine, specs))
        print(
            f"batch {batch}: {best['']:.1f} tokens/s without, {best[grammar]:.1f} with the schema, "
            f"ratio {best[grammar] / best['']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
