"""`tandem bench perplexity`, as a command of its own: `python -m tandem_bench.perplexity`.

The perplexity of a text with two data types of KV or of the computation, by the log probabilities
that the engine itself reports of a prompt. The text is cut into windows, each a prompt of its own.
Both data types compute the same windows, so the difference is paired: its standard error comes from
the differences of the windows, and is much smaller than that of either perplexity.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, run
from cyclopts.validators import Number

from tandem.common.config.engine import Dtype, EngineConfig
from tandem.common.kv_budget import KvBudget
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode, SequenceSpec
from tandem.errors import ConfigError, InternalError, TandemError
from tandem.models.folder import ModelFolder
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem_bench.framework import write
from tandem_bench.prose import english_prose

_Positive = Number(gte=1)


@dataclass(frozen=True)
class Comparison:
    """Perplexities on the same windows. `change` is relative to `against`, such as 0.001."""

    perplexity: float
    against: float
    change: float
    change_error: float  # standard error
    num_predictions: int


def main(
    model: Annotated[str, Parameter(help="Model, as for `tandem up --model`.")] = "smollm2",
    *,
    kv_dtype: Annotated[str, Parameter(help="Data type of the KV pool to judge.")] = "bfloat16",
    against: Annotated[str, Parameter(help="Data type of KV to compare with.")] = "float32",
    dtype: Annotated[Dtype, Parameter(help="Data type of the computation.")] = "auto",
    against_dtype: Annotated[
        Dtype | None, Parameter(help="The same of what is compared with. Default: that of --dtype.")
    ] = None,
    text: Annotated[Path | None, Parameter(help="Text file. Default: Python's manual.")] = None,
    tokens: Annotated[int, Parameter(help="Tokens to predict.", validator=_Positive)] = 50_000,
    window: Annotated[int, Parameter(help="Tokens of a window.", validator=Number(gte=2))] = 1024,
    threads: Annotated[int, Parameter(help="Threads of the engine.", validator=_Positive)] = 1,
    output: Annotated[Path | None, Parameter(help="JSON file to write.")] = None,
) -> None:
    """Compare the perplexity of a text with two data types of KV or of the computation.

    A GGUF file's quantized weights stay quantized with the dtype auto, and no other.
    """
    pairs = (kv_dtype, dtype), (against, against_dtype or dtype)
    try:
        configs = [
            EngineConfig(
                model=model,
                dtype=computed,
                kv_dtype=kept,  # type: ignore[arg-type]  # EngineConfig checks it
                max_num_seqs=1,
                itl_target_s=0.0,
                num_threads=threads,
            )
            for kept, computed in pairs
        ]
        with Waiting(ProgressRow(model, "is loaded")) as waiting:
            folder = resolve(model)
            windows = cut(Tokenizer(folder.path), _read(text), tokens=tokens, window=window)
            result = compare(
                *(
                    losses(folder, config, _told(windows, waiting, number, len(configs)))
                    for number, config in enumerate(configs)
                )
            )
    except TandemError as error:
        print(f"tandem bench: {error.message}", file=sys.stderr)
        sys.exit(1)
    print(
        f"{folder.name}: {result.num_predictions:,} tokens "
        f"in {len(windows)} windows of {window:,}\n"
        f"dtype {pairs[0][1]}, KV in {pairs[0][0]}: perplexity {result.perplexity:.4f}\n"
        f"dtype {pairs[1][1]}, KV in {pairs[1][0]}: perplexity {result.against:.4f}\n"
        f"change: {result.change:+.4%} ± {result.change_error:.4%} (standard error, paired)"
    )
    if output is not None:
        settings = {
            "model": folder.name,
            "kv_dtype": kv_dtype,
            "against_kv_dtype": against,
            "dtype": dtype,
            "against_dtype": pairs[1][1],
        }
        write(output, settings | asdict(result))


def cut(tokenizer: Tokenizer, text: str, *, tokens: int, window: int) -> list[list[int]]:
    """Returns whole windows that predict at least `tokens` tokens. Raises ConfigError if the text
    is too short.

    Each begins with the special tokens that the model wants before a text.
    """
    start = tokenizer.encode("")
    size = window - len(start)
    if size < 2:
        raise ConfigError(f"window is {window}; at least {len(start) + 2} is allowed")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    num_windows = -(-tokens // (window - 1))
    if num_windows * size > len(token_ids):
        raise ConfigError(
            f"the text has {len(token_ids)} tokens; {num_windows * size} are needed for "
            f"{num_windows} windows of {window}"
        )
    return [start + token_ids[i * size : (i + 1) * size] for i in range(num_windows)]


def losses(
    folder: ModelFolder,
    config: EngineConfig,
    windows: Iterable[list[int]],
    budget: KvBudget | None = None,
) -> list[list[float]]:
    """Returns the negative log probability of each token but the first of each window."""
    engine = Engine(config, ModelRunner(folder, config), folder.fingerprint)
    return [_loss(engine, f"{i}", token_ids, budget) for i, token_ids in enumerate(windows)]


def compare(losses: list[list[float]], against: list[list[float]]) -> Comparison:
    """Compares the losses of the same windows, of equal lengths."""
    of_windows = [statistics.fmean(loss) for loss in losses]
    of_against = [statistics.fmean(loss) for loss in against]
    differences = [a - b for a, b in zip(of_windows, of_against, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    error = math.inf
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Comparison(
        perplexity=math.exp(statistics.fmean(of_windows)),
        against=math.exp(statistics.fmean(of_against)),
        change=ratio - 1,
        change_error=ratio * error,
        num_predictions=sum(map(len, losses)),
    )


def _loss(engine: Engine, name: str, token_ids: list[int], budget: KvBudget | None) -> list[float]:
    engine.add(
        SequenceSpec(
            sequence_id=name,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            mode=Mode.LOCAL,
            sampling=SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
            kv_budget=budget,
        )
    )
    found: list[float] = []
    while engine.has_work():
        report = engine.step()
        if report.failed:
            raise InternalError(report.failed[0].message)
        found += [-one.logprob for new in report.new_tokens for one in new.prompt_logprobs]
    assert len(found) == len(token_ids) - 1
    return found


def _told(
    windows: list[list[int]], waiting: Waiting, run: int, num_runs: int
) -> Iterator[list[int]]:
    """Yields the windows of a run, and shows how far all runs are."""
    for number, window in enumerate(windows, run * len(windows)):
        note = f"run {run + 1} of {num_runs}"
        waiting.show(ProgressRow("windows", note, number, num_runs * len(windows)))
        yield window


def _read(path: Path | None) -> str:
    if path is None:
        return english_prose()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error


if __name__ == "__main__":
    run(main)
