"""Judges KV budgets: perplexity of English, and a needle in a haystack, at half of the KV.

    python benchmarks/kv_budgets.py --output benchmarks/results/kv_budgets.json

Each budget is compared with full attention on the same windows of text and the same haystacks. A
haystack is prose with one sentence that names a number, at a depth from its start to its end; the
prompt ends with the beginning of that sentence, and the model is to continue with the number.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.common.config.engine import EngineConfig
from tandem.common.kv_budget import HEAVY_HITTERS, KvBudget
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode, SequenceSpec
from tandem.models.folder import ModelFolder
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem_bench.perplexity import cut, losses
from tandem_bench.prose import english_prose

_DEPTHS = 10
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for `tandem up --model`")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens to predict")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a text, of a haystack")
    parser.add_argument("--sinks", type=int, default=4, help="of the budgets with sinks")
    parser.add_argument("--repeats", type=int, default=5, help="needles at each depth")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
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
    config = EngineConfig(
        model=args.model, max_num_seqs=1, itl_target_s=0.0, num_threads=1, kv_bytes_max=256 << 20
    )
    found = []
    for name, budget in zip(_NAMES, budgets, strict=True):
        of_texts = losses(folder, config, texts, budget)
        depths = _find_needles(folder, config, tokenizer, hay, window, args.repeats, budget)
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
    if args.output is not None:
        settings = {
            "model": folder.name,
            "tokens": sum(map(len, texts)),
            "window": window,
            "sinks": args.sinks,
            "repeats": args.repeats,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings | {"judged": [asdict(each) for each in found]}, indent=1)
        args.output.write_text(text + "\n")


def _perplexity(of_texts: list[list[float]], first: int) -> float:
    """Returns that of the tokens that come after `first` others of their text."""
    return math.exp(statistics.fmean(loss for text in of_texts for loss in text[first:]))


def _find_needles(
    folder: ModelFolder,
    config: EngineConfig,
    tokenizer: Tokenizer,
    hay: list[int],
    window: int,
    repeats: int,
    budget: KvBudget | None,
) -> list[float]:
    """Returns the fraction of needles that were found at each depth."""
    engine = Engine(config, ModelRunner(folder, config), folder.fingerprint)
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
    engine.add(
        SequenceSpec(
            sequence_id=name,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            mode=Mode.LOCAL,
            sampling=SamplingParams(temperature=0, max_tokens=10),
            kv_budget=budget,
        )
    )
    made: list[int] = []
    while engine.has_work():
        made += [token for new in engine.step().new_tokens for token in new.token_ids]
    return made


if __name__ == "__main__":
    main()
