"""Measures the field's claims for serving engines, each against our own engine without the
technique.

    python -m benchmarks.engine.claims [--threads 2] [--repeats 5] [--only kv-cache,chunked-prefill]

    kv-cache          256 tokens of prompt and 128 made; without: every token computes all before
    continuous        requests of mixed lengths, 8 at a time; without: the next 8 start when all 8
                      have ended (the test of Anyscale's "continuous batching", 2023, smaller)
    paged             memory of sequences of about 500 tokens; without: each reserves its longest
    chunked-prefill   four streams decode while a prompt of 4,000 tokens comes: in one step, in
                      chunks, and `paced`: as large as 1.5 times the quiet step allows
    prefix-reuse      time to first token of a prompt of 1,500 tokens, again

One engine in this process, as a worker runs it; no network. With and without take turns within one
run; the machine must be quiet: beside a busy neighbour two threads wait for each other most of the
time. Writes benchmarks/results/claims.json (claims that this run leaves out stay as they were) and
prints the tables of docs/measurements.md.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shared.engines import drained, first_tokens, make_engine, sequence
from benchmarks.shared.requests import random_prompt
from tandem.engine.engine import Engine
from tandem_bench.framework import (
    RESULTS,
    Report,
    medians,
    options,
    quantile,
    read,
    run_main,
    table,
    words,
)

SLOTS = 8  # sequences at a time of the continuous test
STREAMS, LONG_PROMPT = 4, 4000
CHUNKS = (16, 64, 256, 512)  # tokens of a step beside the streams
PACED_S = 1e-6  # a target that no step reaches: each may take 1.5 times what decode alone takes


class Bench:
    """Engines on one set of weights; prompts never repeat unless they are meant to."""

    def __init__(self, threads: int, long_prompt: int) -> None:
        self._threads = threads
        self.long_prompt = long_prompt
        self.rng = random.Random(1)
        self._ids = itertools.count()

    def engine(self, **options: Any) -> Engine:
        # Nobody waits for a token: where a target matters, `options` has one.
        options = {"kv_bytes_max": 2 << 30, "itl_target_s": 0.0, **options}
        return make_engine(num_threads=self._threads, **options)

    def prompt(self, length: int) -> list[int]:
        return random_prompt(self.rng, length)

    def add(self, engine: Engine, prompt: list[int], max_tokens: int, salt: bytes = b"") -> str:
        name = str(next(self._ids))
        engine.add(sequence(name, prompt, max_tokens, cache_salt=salt))
        return name


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def kv_cache(bench: Bench, repeats: int) -> dict[str, Any]:
    engine = bench.engine()

    def cached(prompt: list[int]) -> None:
        bench.add(engine, prompt, 128)
        list(drained(engine))

    def recomputed(prompt: list[int]) -> None:
        tokens = list(prompt)
        for number in range(128):  # each under a salt of its own: nothing is found in the cache
            bench.add(engine, tokens, 1, salt=b"%d" % number)
            list(drained(engine))
            tokens.append(100 + number)

    taken = [
        (seconds(lambda: cached(bench.prompt(256))), seconds(lambda: recomputed(bench.prompt(256))))
        for _ in range(repeats)
    ]
    return ratio_of("256 + 128 tokens", "s", [(off, on) for on, off in taken])


def continuous(bench: Bench, repeats: int) -> dict[str, Any]:
    engine = bench.engine(max_num_seqs=SLOTS)

    def work(rng: random.Random) -> list[tuple[list[int], int]]:
        lengths = [min(256, 1 + int(rng.expovariate(1 / 64))) for _ in range(6 * SLOTS)]
        return [(bench.prompt(64), length) for length in lengths]

    def run(requests: list[tuple[list[int], int]], group: int) -> None:
        for first in range(0, len(requests), group):
            for prompt, max_tokens in requests[first : first + group]:
                bench.add(engine, prompt, max_tokens)
            list(drained(engine))

    taken = []
    for number in range(repeats):
        on = seconds(lambda: run(work(random.Random(number)), 6 * SLOTS))  # noqa: B023
        off = seconds(lambda: run(work(random.Random(number)), SLOTS))  # noqa: B023
        taken.append((off, on))
    return ratio_of(f"{6 * SLOTS} requests, 1 to 256 tokens each", "s", taken)


def paged(bench: Bench, repeats: int) -> dict[str, Any]:
    """The share of the blocks in use that holds no token, over all steps; lengths about 500."""
    engine = bench.engine()
    size, longest, count = engine.layout.block_size, 1024, 32
    for _ in range(count):
        bench.add(engine, bench.prompt(bench.rng.randint(400, 600) - 64), 64)
    shares, reserved = [], []
    for _ in drained(engine):
        load = engine.load()
        slots = load.blocks_used * size
        if load.num_running == count:
            shares.append(load.tokens_wasted / slots)
            reserved.append(1 - (slots - load.tokens_wasted) / (count * longest))
    return {
        "what": f"memory without tokens, {len(shares)} steps, block size {size}",
        "unit": "%",
        "with": round(100 * statistics.mean(shares), 2),
        "without": round(100 * statistics.mean(reserved), 2),
    }


def chunked_prefill(bench: Bench, repeats: int) -> dict[str, Any]:
    """The prompt alone is always computed in steps of the default budget."""
    options: dict[str, dict[str, Any]] = {"paced": {"itl_target_s": PACED_S}}
    for chunk in (*CHUNKS, bench.long_prompt):
        options[str(chunk)] = {"max_tokens_per_step": chunk + STREAMS}
    engine, alone_s = bench.engine(), []
    for _ in range(repeats):
        bench.add(engine, bench.prompt(bench.long_prompt), 1)
        alone_s.append(seconds(lambda: list(drained(engine))))
    rows = []
    for name, chosen in options.items():
        engine = bench.engine(**chosen)
        runs = [beside_long_prompt(bench, engine) for _ in range(repeats)]
        row = medians(runs)
        row["ttft_alone_s"] = statistics.median(alone_s)
        row["ttft_ratio"] = row["ttft_beside_s"] / row["ttft_alone_s"]
        rows.append({"chunk": name, **{key: round(value, 4) for key, value in row.items()}})
        print(json.dumps(rows[-1]), flush=True)
    return {
        "what": f"{STREAMS} streams beside {bench.long_prompt} tokens",
        "unit": "",
        "rows": rows,
    }


def beside_long_prompt(bench: Bench, engine: Engine) -> dict[str, float]:
    streams = [bench.add(engine, bench.prompt(128), 4000) for _ in range(STREAMS)]
    first_tokens(engine, streams)
    for _ in range(8):
        engine.step()
    quiet = [seconds(engine.step) for _ in range(100)]
    long_name = bench.add(engine, bench.prompt(bench.long_prompt), 1)
    beside, done = [], False
    while not done:
        began = time.perf_counter()
        report = engine.step()
        beside.append(time.perf_counter() - began)
        done = any(each.sequence_id == long_name for each in report.new_tokens)
    for name in streams:
        engine.remove(name)
    engine.step()
    return {
        "steps": len(beside),
        "quiet_p50_ms": quantile(quiet, 0.5) * 1e3,
        "quiet_p99_ms": quantile(quiet, 0.99) * 1e3,
        "beside_p50_ms": quantile(beside, 0.5) * 1e3,
        "beside_p99_ms": quantile(beside, 0.99) * 1e3,
        "token_ratio": quantile(beside, 0.99) / quantile(quiet, 0.99),
        "ttft_beside_s": sum(beside),
    }


def prefix_reuse(bench: Bench, repeats: int) -> dict[str, Any]:
    engine = bench.engine()
    taken = []
    for _ in range(repeats):
        prompt = bench.prompt(1500)

        def first_token(prompt: list[int] = prompt) -> None:
            bench.add(engine, prompt, 1)
            list(drained(engine))

        taken.append((seconds(first_token), seconds(first_token)))
    return ratio_of("first token of 1,500 tokens, again", "s", taken)


def ratio_of(what: str, unit: str, taken: list[tuple[float, float]]) -> dict[str, Any]:
    """Returns the medians of pairs (without, with), and the median of their ratios."""
    return {
        "what": what,
        "unit": unit,
        "with": round(statistics.median(on for _, on in taken), 4),
        "without": round(statistics.median(off for off, _ in taken), 4),
        "ratio": round(statistics.median(off / on for off, on in taken), 2),
    }


CLAIMS: dict[str, Callable[[Bench, int], dict[str, Any]]] = {
    "kv-cache": kv_cache,
    "continuous": continuous,
    "paged": paged,
    "chunked-prefill": chunked_prefill,
    "prefix-reuse": prefix_reuse,
}


@options
class Options:
    threads: int = 2
    repeats: int = 5
    long_prompt: int = LONG_PROMPT
    """Tokens of the long prompt of chunked-prefill."""
    only: str = ",".join(CLAIMS)
    output: Path = RESULTS / "claims.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    import torch

    torch.set_num_threads(options.threads)
    bench = Bench(options.threads, options.long_prompt)
    found = read(options.output).get("claims", {})
    for name in words(options.only):
        found[name] = CLAIMS[name](bench, options.repeats)
        print(name, json.dumps(found[name]), flush=True)
    report.write(threads=options.threads, repeats=options.repeats, claims=found)
    print(tables(found))


def tables(found: dict[str, Any]) -> str:
    claims = []
    for name, claim in found.items():
        if "rows" not in claim:
            on, off = (f"{claim[key]:g} {claim['unit']}" for key in ("with", "without"))
            ratio = f"{claim['without'] / claim['with']:.1f}"
            claims.append((f"{name}: {claim['what']}", on, off, ratio))
    text = table("claim | with | without | ratio", claims)
    chunks = [
        (
            row["chunk"],
            f"{row['steps']:g}",
            f"{row['quiet_p99_ms']:.0f} ms",
            f"{row['beside_p99_ms']:.0f} ms",
            f"{row['token_ratio']:.2f}",
            f"{row['ttft_beside_s']:.1f} s",
            f"{row['ttft_ratio']:.2f}",
        )
        for row in found.get("chunked-prefill", {}).get("rows", ())
    ]
    columns = "chunk | steps | quiet p99 | beside p99 | ratio | TTFT beside | ratio"
    return f"{text}\n\n{table(columns, chunks)}" if chunks else text


if __name__ == "__main__":
    run_main(main)
