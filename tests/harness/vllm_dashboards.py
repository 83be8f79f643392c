"""The queries of vLLM's Grafana dashboards.

`tests/data/vllm_dashboards.json` has each expression of the dashboards in vLLM's source package,
unchanged. `VLLM_SOURCES` can name an unpacked package to compare it with (test_vllm_names.py).

The newer `vllm_overview.json` in vLLM's repository is in no package yet, so this module lists its
metrics, labels and forms (November 2026). One of its queries is omitted: the hits of the multimodal
cache, which vLLM also answers with nothing while it serves only text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WINDOW = "60s"
QUANTILES = (0.5, 0.9, 0.95, 0.99)
LATENCIES = (
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_queue_time_seconds",
)
LENGTHS = ("vllm:request_prompt_tokens", "vllm:request_generation_tokens")
STEPS = "vllm:iteration_tokens_total"
SUMS = (
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_max_num_generation_tokens",
)
COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
)
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
# a metric, its label, and the label values that are queried individually
LABELLED = {
    "vllm:request_success_total": ("finished_reason", ("error",)),
    "vllm:prompt_tokens_by_source_total": (
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "vllm:num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
}
# ratios of two counters
SHARES = (
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"),
)
# histogram bounds that are queried as latency limits
LIMITS = {
    "vllm:time_to_first_token_seconds": ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"),
    "vllm:request_time_per_output_token_seconds": (
        *("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"),
    ),
}


_STOCK = Path(__file__).parents[1] / "data" / "vllm_dashboards.json"
DASHBOARDS = "examples/observability"  # path in vLLM's sources


def stock() -> dict[str, list[str]]:
    """The expressions of each dashboard in the package, by its path."""
    return dict(json.loads(_STOCK.read_text())["expressions"])


def expressions(dashboard: object) -> Iterator[str]:
    """Yields the expressions of a dashboard's panels, in order."""
    children: list[Any] = []
    if isinstance(dashboard, dict):
        if isinstance(found := dashboard.get("expr"), str):
            yield found
        children = list(dashboard.values())
    elif isinstance(dashboard, list):
        children = dashboard
    for child in children:
        yield from expressions(child)


def queries(job: str, instance: str, model: str) -> Iterator[str]:
    """Yields every query for one model, as sent by Grafana with all variables replaced."""
    filled = {"$__rate_interval": WINDOW, "$__interval": WINDOW, "$__range": WINDOW}
    filled |= {"$model_name": model, "$Deployment_id": model}
    for expression in (e for found in stock().values() for e in found):
        for variable, value in filled.items():
            expression = expression.replace(variable, value)
        assert "$" not in expression, expression
        yield expression
    server = f'job=~"{job}",instance=~"{instance}"'
    for of in (f'model_name="{model}"', f'{server},model_name=~"{model}"'):
        yield from _histograms(of)
        yield from _counters(of)
        yield from _limits(of)
    yield from _http(server)


def _rate(name: str, of: str, function: str = "rate") -> str:
    return f"{function}({name}{{{of}}}[{WINDOW}])"


def _histograms(of: str) -> Iterator[str]:
    for name in (*LATENCIES, *LENGTHS, STEPS):
        buckets = _rate(f"{name}_bucket", of)
        for quantile in QUANTILES:
            yield f"histogram_quantile({quantile}, sum by(le) ({buckets}))"
            yield f"histogram_quantile({quantile}, sum by(le, model_name) ({buckets}))"
        yield f"sum by(le) ({_rate(f'{name}_bucket', of, 'increase')})"
    for name in (*LATENCIES, *LENGTHS, STEPS, *SUMS):
        summed, count = (_rate(f"{name}_{suffix}", of) for suffix in ("sum", "count"))
        yield from (summed, count, f"{summed} / {count}")
        yield f"sum({summed}) / (sum({count}) > 0)"
    for name in LENGTHS:
        buckets = _rate(f"{name}_bucket", of, "increase")
        count = _rate(f"{name}_count", of, "increase")
        yield f"sum by (le) ({buckets}) / on () group_left () (sum({count}) > 0)"


def _counters(of: str) -> Iterator[str]:
    for name in COUNTERS:
        yield _rate(name, of)
        yield f"sum({_rate(name, of)})"
        yield f"sum by(model_name) ({_rate(name, of)})"
        yield f"round(sum by(model_name) ({_rate(name, of, 'increase')}))"
    for name in GAUGES:
        yield f"{name}{{{of}}}"
        yield from (f"{f}({name}{{{of}}})" for f in ("count", "sum", "max", "avg", "min"))
        yield f"max by(model_name) (max_over_time({name}{{{of}}}[{WINDOW}]))"
    finished = _rate("vllm:request_success_total", of)
    yield f"sum by(finished_reason) ({_rate('vllm:request_success_total', of, 'increase')})"
    yield (
        f"sum by (finished_reason) ({finished})"
        f" / ignoring (finished_reason) group_left () (sum({finished}) > 0)"
    )
    prompt_tokens = _rate("vllm:prompt_tokens_total", of)
    yield f"sum({prompt_tokens}) / sum({finished})"
    for name, (label, values) in LABELLED.items():
        for value in values:
            one = f'{of},{label}="{value}"'
            yield f"sum({_rate(name, one)})" if "_total" in name else f"sum({name}{{{one}}})"
    for part, whole in SHARES:
        yield f"sum({_rate(part, of)}) / (sum({_rate(whole, of)}) > 0)"


def _limits(of: str) -> Iterator[str]:
    for name, bounds in LIMITS.items():
        for bound in bounds:
            within = _rate(f"{name}_bucket", f'{of},le="{bound}"')
            yield f"sum({within}) / (sum({_rate(f'{name}_count', of)}) > 0)"


def _http(of: str) -> Iterator[str]:
    calls = _rate("http_requests_total", of)
    failed = _rate("http_requests_total", f'{of},status="5xx"')
    yield f"(sum({failed}) or vector(0)) / (sum({calls}) > 0)"
    for label in ("status", "handler"):
        yield f"sum by ({label}) ({calls})"
    summed, count = (_rate(f"http_request_duration_seconds_{x}", of) for x in ("sum", "count"))
    yield f"sum by (handler) ({summed}) / (sum by (handler) ({count}) > 0)"
