"""Measures what edits of logits and log probabilities cost a decode step, in turn.

    .venv/bin/python benchmarks/edits.py [--model smollm2] [--batch 32] [--steps 12] [--rounds 8]
        [--cpu-time]

A round decodes with each of the options once, so that a busy machine slows all of them. A ratio is
the median over the rounds of the option's median step over that of the plain step in the round.
`--cpu-time` counts the time of the engine's own thread, which others on the machine disturb less.

The last line is about sequences that ask for none of this: what a step takes to find that out.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import count
from timeit import repeat
from typing import cast

import torch
from msgspec.structs import replace

from tandem.common.config.engine import EngineConfig
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.sampler import StepSampler, next_draw
from tandem.engine.runner_protocol import Runner
from tandem.engine.scheduler.schedule import Chunk
from tandem.engine.sequence import Sequence
from tandem.engine.types import Mode, SequenceSpec
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem.models.source import resolve
from tandem_kernels.sampling import Draw

PLAIN = "nothing"
BIAS = dict.fromkeys(range(1000, 1300), 1.0)
# Of the mask: nearly all tokens may come, or letters only.
GRAMMARS = {"mask, most tokens": r"(?s:.){2000}", "mask, few tokens": "[a-z]{2000}"}
OPTIONS: dict[str, SamplingParams] = {
    PLAIN: SamplingParams(),
    **dict.fromkeys(GRAMMARS, SamplingParams()),
    "bias of 300 tokens": SamplingParams(logit_bias=BIAS),
    "penalties": SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2
    ),
    "logprobs": SamplingParams(logprobs=0),
    "top_logprobs 20": SamplingParams(logprobs=20),
}


def step_ms(
    engine: Engine, specs: list[SequenceSpec], num_steps: int, clock: Callable[[], float]
) -> float:
    """Returns the median of some decode steps of all the sequences."""
    for spec in specs:
        engine.add(spec)
    times: list[float] = []
    while len(times) < num_steps:
        if not engine.has_work():  # a grammar is compiled
            continue
        started = clock()
        report = engine.step()
        if report.num_decode_tokens == len(specs):
            times.append(1000 * (clock() - started))
    for spec in specs:
        engine.remove(spec.sequence_id)
    return statistics.median(times)


class _NoDraw:
    """Stands for a runner whose draw takes no time."""

    def sample(self, logits: torch.Tensor, draws: list[Draw], rows: list[int] | None) -> list[int]:
        return [0] * len(draws)


def unused_us(batch: int) -> float:
    """Returns the microseconds that the sampler takes, less those of the draws alone, for sequences
    that want no edits and no log probabilities."""
    sequences = [
        Sequence.from_spec(
            SequenceSpec(
                str(place), [1, 2], 2, Mode.LOCAL, SamplingParams(temperature=0, max_tokens=9)
            ),
            arrival=place,
            block_size=16,
            chain_root=bytes(16),
        )
        for place in range(batch)
    ]
    chunks = [Chunk(each, 1, samples=True, all_logits=False) for each in sequences]
    runner, logits = cast("Runner", _NoDraw()), torch.empty(0)

    def draws_alone() -> None:
        runner.sample(logits, [next_draw(each) for each in sequences], None)

    whole, alone = (
        min(repeat(work, number=1000, repeat=9)) * 1000
        for work in (lambda: StepSampler(chunks).run(runner, logits), draws_alone)
    )
    return whole - alone


def main() -> None:
    """Prints a line for each option."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cpu-time", action="store_true", help="of the engine's thread")
    asked = parser.parse_args()
    clock = time.thread_time if asked.cpu_time else time.perf_counter
    folder = resolve(asked.model)
    config = EngineConfig(
        model=asked.model, num_threads=asked.threads, num_blocks=1024, itl_target_s=0.0
    )
    compiler = GrammarCompiler.of(folder)
    engine = Engine(config, ModelRunner(folder, config), folder.fingerprint, compiler)
    texts = {
        name: grammar_text(StructuredOutput(name, "regex", regex))
        for name, regex in GRAMMARS.items()
    }
    numbers = count()

    def specs(name: str, sampling: SamplingParams) -> list[SequenceSpec]:
        sampling = replace(sampling, temperature=asked.temperature, max_tokens=1000)
        return [
            SequenceSpec(
                sequence_id=str(next(numbers)),
                token_ids=[1, 100 + place, *range(200, 230)],
                num_prompt_tokens=32,
                mode=Mode.LOCAL,
                sampling=sampling,
                grammar=texts.get(name, ""),
            )
            for place in range(asked.batch)
        ]

    times: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for _ in range(asked.rounds):
        for name, sampling in OPTIONS.items():
            times[name].append(step_ms(engine, specs(name, sampling), asked.steps, clock))
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times[PLAIN], strict=True))
        print(f"{name:20} {statistics.median(found):8.2f} ms, ratio {ratio:.3f}")
    print(f"looking for none of them: {unused_us(asked.batch):.0f} us")


if __name__ == "__main__":
    main()
