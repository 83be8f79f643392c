"""Reports as a table for people."""

from collections.abc import Sequence

from rich.table import Table

from tandem.simulator.output.report import Report

COLUMNS = (
    "load",
    "policy",
    "goodput",
    "hits",
    "pulled",
    "max/mean",
    "TTFT p50",
    "p90",
    "p99",
    "TPOT p50",
    "p99",
    "refused",
    "lost",
)


def rows(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Returns a row for each load and policy, averaged over their seeds."""
    groups: dict[tuple[float, str], list[Report]] = {}
    for report in reports:
        groups.setdefault((report.load, report.policy), []).append(report)
    return [_row(load, policy, group) for (load, policy), group in groups.items()]


def make_table(reports: Sequence[Report], title: str) -> Table:
    table = Table(title=title, caption="load and goodput in %; TTFT in s, TPOT in ms")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right")
    load = ""
    for row in rows(reports):
        if load and row[0] != load:
            table.add_section()
        load = row[0]
        table.add_row(*row)
    return table


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _row(load: float, policy: str, group: Sequence[Report]) -> tuple[str, ...]:
    return (
        f"{load * 100:.0f}",
        policy,
        f"{mean([r.goodput for r in group]) * 100:.2f}",
        f"{mean([r.hit_rate for r in group]) * 100:.1f}",
        f"{mean([r.pulled_rate for r in group]) * 100:.1f}",
        f"{mean([r.load_tokens for r in group]):.2f}",
        *(f"{mean([r.ttft_s[q] for r in group]):.2f}" for q in ("p50", "p90", "p99")),
        *(f"{mean([r.tpot_s[q] for r in group]) * 1000:.0f}" for q in ("p50", "p99")),
        f"{sum(r.num_refused for r in group)}",
        f"{sum(r.num_lost for r in group)}",
    )
