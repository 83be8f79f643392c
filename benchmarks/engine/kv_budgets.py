"""Judges KV budgets: perplexity of English, and a needle in a haystack, at half of the KV.

    python -m benchmarks.engine.kv_budgets --output benchmarks/results/kv_budgets.json

Each budget is compared with full attention on the same windows of text and the same haystacks. A
haystack is prose with one sentence that names a number, at a depth from its start to its end; the
prompt ends with the beginning of that sentence, and the model is to continue with the number.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.engines import drained, make_engine, sequence
from tandem.common.config.engine import EngineConfig
from tandem.common.kv_budget import HEAVY_HITTERS, KvBudget
from tandem.engine.engine import Engine
from tandem.models.folder import ModelFolder
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem_bench.framework import Report, options, run_main
from tandem_bench.perplexity import cut, losses
from tandem_bench.prose import english_prose

_DEPTHS = 10
ENGINE = {"max_num_seqs": 1, "itl_target_s": 0.0, "num_threads": 1, "kv_bytes_max": 256 << 20}
_NAMES = ("full attention", "heavy hitters", "sinks and window", "window alone")


@dataclass(frozen=True)
class Judged:
    """A judged budget; `perplexity_after` is of tokens that do not see all before them."""

    budget: str
    kv_tokens: int  # that a token sees at most
    perplexity: float
    perplexity_after: float
    needles_by_depth: list[float]  # fraction found, at depths from the start to the end
    needles: float


@options
class Options:
    model: str = "smollm2"
    """Model, as for `tandem up --model`."""
    tokens: int = 50_000
    """Tokens to predict."""
    window: int = 1024
    """Tokens of a text and of a haystack."""
    sinks: int = 4
    """Sinks of the budgets that have some."""
    repeats: int = 5
    """Needles at each depth."""
    output: Path | None = None
    """JSON file to write."""


def main(args: Options = Options()) -> None:
    report = Report(args.output)
    window = args.window
    folder = resolve(args.model)
    tokenizer, half = Tokenizer(folder.path), window // 2
    texts = cut(tokenizer, english_prose(), tokens=args.tokens, window=window)
    hay = tokenizer.encode(english_prose(), add_special_tokens=False)
    budgets = (
        None,
        KvBudget(half, args.sinks, HEAVY_HITTERS),
        KvBudget(half, args.sinks),
        KvBudget(half, 0),
    )
    config = EngineConfig(model=args.model, **ENGINE)
    found = []
    for name, budget in zip(_NAMES, budgets, strict=True):
        of_texts = losses(folder, config, texts, budget)
        depths = _find_needles(folder, tokenizer, hay, window, args.repeats, budget)
        judged = Judged(
            budget=name,
            kv_tokens=window if budget is None else half,
            perplexity=_perplexity(of_texts, 0),
            perplexity_after=_perplexity(of_texts, half),
            needles_by_depth=depths,
            needles=statistics.fmean(depths),
        )
        found.append(judged)
        shown = " ".join(f"{share:.1f}" for share in depths)
        print(
            f"{name:17} perplexity {judged.perplexity:8.2f}, after {half} tokens "
            f"{judged.perplexity_after:8.2f}; needles {judged.needles:.2f} (by depth: {shown})",
            flush=True,
        )
    report.write(
        model=folder.name,
        tokens=sum(map(len, texts)),
        window=window,
        sinks=args.sinks,
        repeats=args.repeats,
        judged=found,
    )


def _perplexity(of_texts: list[list[float]], first: int) -> float:
    """Returns that of the tokens that come after `first` others of their text."""
    return math.exp(statistics.fmean(loss for text in of_texts for loss in text[first:]))


def _find_needles(
    folder: ModelFolder,
    tokenizer: Tokenizer,
    hay: list[int],
    window: int,
    repeats: int,
    budget: KvBudget | None,
) -> list[float]:
    """Returns the fraction of needles that were found at each depth."""
    engine = make_engine(folder, **ENGINE)
    choose, shares = random.Random(1), []
    for depth in range(_DEPTHS):
        num_found = 0
        for i in range(repeats):
            number = str(choose.randrange(10_000, 100_000))
            start = choose.randrange(len(hay) - window)
            prompt = _haystack(tokenizer, hay[start:], window, depth / (_DEPTHS - 1), number)
            made = tokenizer.decode(_continue(engine, f"{depth}-{i}", prompt, budget))
            num_found += made.strip().startswith(number)
        shares.append(num_found / repeats)
    return shares


def _haystack(
    tokenizer: Tokenizer, hay: list[int], window: int, depth: float, number: str
) -> list[int]:
    """Returns a prompt of `window` tokens, the needle's at `depth` of the haystack among them."""
    needle = tokenizer.encode(f"\nThe secret number is {number}.\n", add_special_tokens=False)
    question = tokenizer.encode("\nThe secret number is", add_special_tokens=False)
    start = tokenizer.encode("")
    num_hay = window - len(start) - len(needle) - len(question)
    before = round(num_hay * depth)
    return start + hay[:before] + needle + hay[before:num_hay] + question


def _continue(engine: Engine, name: str, prompt: list[int], budget: KvBudget | None) -> list[int]:
    engine.add(sequence(name, prompt, 10, kv_budget=budget))
    return [
        token for report in drained(engine) for new in report.new_tokens for token in new.token_ids
    ]


if __name__ == "__main__":
    run_main(main)
