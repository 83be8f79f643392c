"""Measures what sampling, edits of logits and log probabilities cost a decode step, in turn.

    python -m benchmarks.engine.edits [--model smollm2] [--batch 32] [--steps 12] [--rounds 8]
        [--cpu-time]

A round decodes with each of the options once, so that a busy machine slows all of them. A ratio is
the median over the rounds of the option's median step over that of the plain step in the round.
`--cpu-time` counts the time of the engine's own thread, which others on the machine disturb less.

The last line is about sequences that ask for none of this: what a step takes to find that out.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from timeit import repeat
from typing import cast

import torch
from msgspec.structs import replace

from benchmarks.shared.engines import make_engine, sequence
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import HostTokens
from tandem.engine.executor.sampler import StepSampler, next_draw
from tandem.engine.runner_protocol import Runner
from tandem.engine.scheduler.schedule import Chunk
from tandem.engine.sequence import Sequence
from tandem.engine.types import SequenceSpec
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem_bench.framework import in_turn, options, ratios, run_main
from tandem_kernels.sampling import Draw

PLAIN = "nothing"
BIAS = dict.fromkeys(range(1000, 1300), 1.0)
# Of the mask: nearly all tokens may come, or letters only.
GRAMMARS = {"mask, most tokens": r"(?s:.){2000}", "mask, few tokens": "[a-z]{2000}"}
OPTIONS: dict[str, SamplingParams] = {
    PLAIN: SamplingParams(),
    "temperature 1": SamplingParams(temperature=1),
    "temperature 1, top_p 0.95": SamplingParams(temperature=1, top_p=0.95),
    "temperature 1, top_k 20, top_p 0.8": SamplingParams(temperature=1, top_k=20, top_p=0.8),
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

    def start_sampling(self, logits: torch.Tensor, draws: list[Draw]) -> HostTokens:
        return HostTokens([0] * len(draws))


def unused_us(batch: int) -> float:
    """Returns the microseconds that the sampler takes, less those of the draws alone, for sequences
    that want no edits and no log probabilities."""
    sequences = [
        Sequence.from_spec(
            sequence(str(place), [1, 2], 9),
            arrival=place,
            block_size=16,
            chain_root=bytes(16),
        )
        for place in range(batch)
    ]
    chunks = [Chunk(each, 1, samples=True, all_logits=False) for each in sequences]
    runner, logits = cast("Runner", _NoDraw()), torch.empty(0)

    def draws_alone() -> None:
        runner.start_sampling(logits, [next_draw(each) for each in sequences]).wait()

    def sample_all() -> None:
        sampler = StepSampler(chunks)
        sampler.start(runner, logits)
        sampler.finish(runner, logits)

    whole, alone = (
        min(repeat(work, number=1000, repeat=9)) * 1000 for work in (sample_all, draws_alone)
    )
    return whole - alone


@options
class Options:
    model: str = "smollm2"
    batch: int = 32
    steps: int = 12
    rounds: int = 8
    threads: int = 1
    temperature: float = 0.0
    cpu_time: bool = False
    """Count the CPU time of the engine's thread."""


def main(options: Options = Options()) -> None:
    """Prints a line for each option."""
    clock = time.thread_time if options.cpu_time else time.perf_counter
    engine = make_engine(
        options.model, num_threads=options.threads, num_blocks=1024, itl_target_s=0.0
    )
    texts = {
        name: grammar_text(StructuredOutput(name, "regex", regex))
        for name, regex in GRAMMARS.items()
    }
    names = count()

    def take_turn(name: str) -> float:
        sampling = OPTIONS[name]
        sampling = replace(sampling, temperature=sampling.temperature or options.temperature)
        specs = [
            sequence(
                str(next(names)),
                [1, 100 + place, *range(200, 230)],
                1000,
                sampling,
                grammar=texts.get(name, ""),
            )
            for place in range(options.batch)
        ]
        return step_ms(engine, specs, options.steps, clock)

    ways = {name: partial(take_turn, name) for name in OPTIONS}
    for name, found in (taken := in_turn(ways, options.rounds, warm_up=0)).items():
        ratio = ratios(found, taken[PLAIN]).median
        print(f"{name:20} {statistics.median(found):8.2f} ms, ratio {ratio:.3f}")
    print(f"looking for none of them: {unused_us(options.batch):.0f} us")


if __name__ == "__main__":
    run_main(main)
