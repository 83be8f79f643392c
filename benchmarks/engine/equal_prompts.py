"""Many equal prompts at once, each computed, and with those that wait for the first.

    python -m benchmarks.engine.equal_prompts [--rounds 3] [--prompts 50] [--tokens 512]

Two engines take turns with a group of equal prompts that nobody had before; in one of them nobody
waits for blocks that another computes. Tokens are compared. Figures are medians over the rounds.
Writes benchmarks/results/equal_prompts.json.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from random import Random

from benchmarks.shared.engines import drained, make_engine, sequence
from benchmarks.shared.requests import random_prompt
from tandem_bench.framework import RESULTS, Report, in_turn, medians, options, run_main

KINDS = ("each computes", "one computes")
ANSWER = 4  # tokens


@options
class Options:
    rounds: int = 3
    prompts: int = 50
    """Equal prompts of a round."""
    tokens: int = 512
    """Tokens of a prompt."""
    threads: int = 1
    output: Path = RESULTS / "equal_prompts.json"


class Group:
    """An engine that takes its turn with the group of each round."""

    def __init__(self, options: Options, answers: list[list[list[int]]]) -> None:
        """`answers` gets the tokens of each prompt of a group."""
        self.engine = make_engine(num_threads=options.threads)
        self._options = options
        self._answers = answers
        self._rng = Random(0)

    def take_turn(self) -> dict[str, float]:
        """Returns the TTFTs in ms and the number of computed tokens."""
        prompt = random_prompt(self._rng, self._options.tokens)
        start, num_computed = time.perf_counter(), 0
        ttft_ms: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        for number in range(self._options.prompts):
            self.engine.add(sequence(str(number), prompt, ANSWER))
        for report in drained(self.engine):
            now = 1e3 * (time.perf_counter() - start)
            num_computed += report.num_prefill_tokens
            for new in report.new_tokens:
                ttft_ms.setdefault(new.sequence_id, now)
                tokens.setdefault(new.sequence_id, []).extend(new.token_ids)
        self._answers.append(list(tokens.values()))
        return {
            "ttft_first_ms": min(ttft_ms.values()),
            "ttft_p50_ms": statistics.median(ttft_ms.values()),
            "ttft_last_ms": max(ttft_ms.values()),
            "computed": num_computed,
        }


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    answers: dict[str, list[list[list[int]]]] = {kind: [] for kind in KINDS}
    groups = {kind: Group(options, answers[kind]) for kind in KINDS}
    scheduler = groups["each computes"].engine._scheduler
    scheduler.early_reuse.awaits = lambda *_, **__: False  # type: ignore[method-assign]
    taken = in_turn({k: g.take_turn for k, g in groups.items()}, options.rounds, warm_up=0)
    for each, one in zip(*answers.values(), strict=True):
        assert all(answer == one[0] for answer in (*each, *one)), "another token"
    rows = {kind: medians(found) for kind, found in taken.items()}
    report.write(prompts=options.prompts, tokens=options.tokens, rounds=options.rounds, rows=rows)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    run_main(main)
