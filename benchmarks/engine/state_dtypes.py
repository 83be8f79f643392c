"""Perplexity with states in bfloat16 and int8 beside float32, on the model of hybrid_model.py.

    python -m benchmarks.engine.state_dtypes [--every 64,512] [--windows 60] [--output FILE]

The program benchmarks.engine.hybrid_model trains the model before.
A window of text is computed in chunks of so many tokens. After each, its states are frozen, and the
next chunk starts from them, as a request that resumes there. Such a rounding after every 64 tokens
is the worst case: most requests resume once. Changes are paired by window, with their standard
errors. Writes benchmarks/results/state_dtypes.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import hybrid_model
from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.folder import ModelFolder
from tandem.models.source import resolve
from tandem_bench.framework import RESULTS, Report, numbers, options, run_main, table
from tandem_bench.perplexity import compare

_WINDOW = 1024
_DTYPES = ("bfloat16", "int8")


@options
class Options:
    every: str = "64,512"
    windows: int = 60
    threads: int = 1
    output: Path = RESULTS / "state_dtypes.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    folder = resolve(str(hybrid_model.FOLDER))
    text = hybrid_model.texts()[1]
    starts = range(0, min(len(text), options.windows * _WINDOW) - _WINDOW + 1, _WINDOW)
    windows = [text[start : start + _WINDOW] for start in starts]
    runners = {dtype: make_runner(folder, dtype, options.threads) for dtype in _DTYPES}
    exact = make_runner(folder, "float32", options.threads)
    rows: list[dict[str, Any]] = []
    against = [losses(exact, window, _WINDOW) for window in windows]
    for dtype, runner in runners.items():
        for every in numbers(options.every):
            found = compare([losses(runner, window, every) for window in windows], against)
            slot_bytes, whole = (
                each.layout().groups[-1].layout.block_bytes for each in (runner, exact)
            )
            rows.append(
                {
                    "state_dtype": dtype,
                    "every": every,
                    "bytes": slot_bytes / whole,
                    "perplexity": found.perplexity,
                    "against": found.against,
                    "change": found.change,
                    "change_error": found.change_error,
                }
            )
    report.write(windows=len(windows), window=_WINDOW, rows=rows)
    print(
        table(
            "states | resumed every | bytes | perplexity | float32 | change",
            (
                (
                    row["state_dtype"],
                    f"{row['every']} tokens",
                    f"{row['bytes']:.2f}",
                    f"{row['perplexity']:.4f}",
                    f"{row['against']:.4f}",
                    f"{row['change']:+.4%} ± {row['change_error']:.4%}",
                )
                for row in rows
            ),
        )
    )


def make_runner(folder: ModelFolder, state_dtype: str, threads: int) -> ModelRunner:
    config = EngineConfig(
        model="",
        device="cpu",
        dtype="float32",
        state_dtype=state_dtype,  # type: ignore[arg-type]
        max_num_seqs=1,
        num_threads=threads,
    )
    runner = ModelRunner(folder, config)
    runner.allocate(_WINDOW // config.block_size, 2)
    return runner


def losses(runner: ModelRunner, window: list[int], every: int) -> list[float]:
    """Returns the negative log probability of each token of a window but the first. The sequence
    resumes after every `every` tokens."""
    layout = runner.layout()
    (group,) = layout.state_groups
    blocks = list(range(_WINDOW // layout.block_size))
    found: list[float] = []
    for first in range(0, len(window), every):
        end = min(len(window), first + every)
        piece = SequenceSlice(
            window[first:end], end, blocks, True, all_logits=True, other_tables=[[0]]
        )
        logits = runner.forward(StepBatch([piece], live_slots=[frozenset()]))
        targets = torch.tensor(window[first + 1 : end + 1])
        of_tokens = logits[: len(targets)].log_softmax(-1)
        found += (-of_tokens.gather(1, targets.unsqueeze(1)).squeeze(1)).tolist()
        runner.store_states([(0, 1, group)])
        runner.copy_blocks([(1, 0, group)])
    return found


if __name__ == "__main__":
    run_main(main)
