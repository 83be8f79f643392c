"""Measures Gated DeltaNet on the CPU: one layer, by the C++ kernel, by torch, and by transformers.

    python -m benchmarks.engine.states [--threads 2] [--heads 16] [--rounds 9] [--cpu-time]

A *decode* step reads and writes the state of one sequence. Each step takes another one of many
sequences, so the states come from memory. Beside it, torch copies as many bytes. *Prefill* computes
512 tokens of one sequence. Ways take turns, and ratios are medians over the rounds. `--cpu-time`
counts the CPU time of all threads, which others on the machine disturb less.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from tandem_bench.framework import RESULTS, Report, in_turn, options, ratios, run_main, table
from tandem_kernels import linear_attention
from tandem_kernels.linear_attention import StateSpan, delta_gates
from tandem_kernels.native import library
from tandem_kernels.native.state import StateKernels

DIM, PREFILL, STEPS = 128, 512, 20  # size of heads, tokens of a prefill, steps of a turn


@options
class Options:
    threads: int = 2
    heads: int = 16
    sequences: int = 200
    rounds: int = 9
    cpu_time: bool = False
    """Count the CPU time of the process instead of time."""
    output: Path = RESULTS / "states.json"


def main(options: Options = Options()) -> None:
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    report = Report(options.output)
    found = library.load()
    assert found is not None, "this machine has no compiled kernels"
    native = StateKernels(found, options.threads)
    states = torch.randn(options.sequences, options.heads, DIM, DIM)
    state_gb = 1e-9 * states[0].numel() * states.element_size()
    ways = decode_ways(native, states, options.heads)
    decode = taken_ms(ways, STEPS, options.rounds, clock)
    prefill = taken_ms(prefill_ways(native, states, options.heads), 1, options.rounds, clock)
    rows = [
        {
            "work": work,
            "way": way,
            "ms": round(statistics.median(times), 3),
            "ratio": ratios(times, taken["C++"]),
            "gb_per_s": round(2e3 * state_gb / statistics.median(times), 1),
        }
        for work, taken in (("decode", decode), ("prefill", prefill))
        for way, times in taken.items()
    ]
    report.write(threads=options.threads, heads=options.heads, cpu_time=options.cpu_time, rows=rows)
    print(
        table(
            "work | way | ms | time beside C++ | states read and written, GB/s",
            (
                (
                    *(row["work"], row["way"], row["ms"], row["ratio"]),
                    row["gb_per_s"] if row["work"] == "decode" else "",
                )
                for row in rows
            ),
        )
    )


def taken_ms(
    ways: dict[str, Callable[[], object]], num: int, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Returns the milliseconds of a call of each way by round: the mean of `num` calls."""

    def take_turn(way: Callable[[], object]) -> float:
        started = clock()
        for _ in range(num):
            way()
        return 1e3 * (clock() - started) / num

    return in_turn({name: partial(take_turn, way) for name, way in ways.items()}, rounds)


def inputs(num_rows: int, heads: int) -> tuple[torch.Tensor, ...]:
    """Returns q, k and v, and then the arguments of delta_gates."""
    rows = [torch.randn(num_rows, heads, DIM) for _ in range(3)]
    gates = [torch.randn(num_rows, heads) for _ in range(2)]
    return (*rows, *gates, torch.randn(heads), torch.randn(heads))


def decode_ways(
    native: StateKernels, states: torch.Tensor, heads: int
) -> dict[str, Callable[[], object]]:
    raw = inputs(1, heads)
    gated = (*raw[:3], *delta_gates(*raw[3:]))
    target = states.clone()  # its memory is in place
    numbers = {name: count() for name in ("C++", "torch", "transformers", "copy")}

    def slot(name: str) -> int:
        return next(numbers[name]) % len(states)

    def by_transformers() -> None:
        at = slot("transformers")
        _, state = torch_recurrent_gated_delta_rule(
            *(each.unsqueeze(0) for each in gated),
            initial_state=states[at : at + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        states[at] = state[0]

    return {
        "C++": lambda: native.gated_delta_rule(*raw, states, [StateSpan(0, 1, 9, slot("C++"))]),
        "torch": lambda: linear_attention.gated_delta_rule_recurrent(
            *gated, states, [StateSpan(0, 1, 9, slot("torch"))]
        ),
        "transformers": by_transformers,
        "copy": lambda: target[at := slot("copy")].copy_(states[at]),
    }


def prefill_ways(
    native: StateKernels, states: torch.Tensor, heads: int
) -> dict[str, Callable[[], object]]:
    raw = inputs(PREFILL, heads)
    gated = (*raw[:3], *delta_gates(*raw[3:]))
    spans = [StateSpan(0, PREFILL, 0, 0)]
    return {
        "C++": lambda: native.gated_delta_rule(*raw, states, spans),
        "torch, chunked": lambda: linear_attention.gated_delta_rule(*gated, states, spans),
        "torch, recurrent": lambda: linear_attention.gated_delta_rule_recurrent(
            *gated, states, spans
        ),
        "transformers, chunked": lambda: torch_chunk_gated_delta_rule(
            *(each.unsqueeze(0) for each in gated),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        ),
    }


if __name__ == "__main__":
    run_main(main)
