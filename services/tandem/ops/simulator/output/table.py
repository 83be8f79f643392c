"""Formats the results of simulations as tables."""

from collections.abc import Sequence

from rich.table import Table

from tandem.ops.simulator.output.report import RunReport

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


def rows(reports: Sequence[RunReport]) -> list[tuple[str, ...]]:
    """Returns one row for each load and policy, averaged over the seeds."""
    return [_row(*key, group) for key, group in _groups(reports).items()]


def make_table(reports: Sequence[RunReport], title: str) -> Table:
    return _table(COLUMNS, rows(reports), title, "load and goodput in %; TTFT in s, TPOT in ms")


def tier_columns(reports: Sequence[RunReport]) -> tuple[str, ...]:
    """Returns the column names of `tier_rows`: load, policy, hits in the KV pool, hits in each
    tier, and GB loaded from each tier."""
    tiers = reports[0].tier_hit_rates
    return ("load", "policy", "device", *tiers, *(f"{name} GB" for name in tiers))


def tier_rows(reports: Sequence[RunReport]) -> list[tuple[str, ...]]:
    """Returns one row for each load and policy, averaged over the seeds."""
    return [_tier_row(*key, group) for key, group in _groups(reports).items()]


def make_tier_table(reports: Sequence[RunReport]) -> Table:
    """Returns the table of cache hits in each tier and of bytes loaded from each tier."""
    caption = "prompt tokens in % by where their KV was; GB that all workers loaded"
    return _table(tier_columns(reports), tier_rows(reports), "tiers", caption)


def _table(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], title: str, caption: str
) -> Table:
    table = Table(title=title, caption=caption)
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right")
    load = ""
    for row in rows:
        if load and row[0] != load:
            table.add_section()
        load = row[0]
        table.add_row(*row)
    return table


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _groups(reports: Sequence[RunReport]) -> dict[tuple[float, str], list[RunReport]]:
    groups: dict[tuple[float, str], list[RunReport]] = {}
    for report in reports:
        groups.setdefault((report.load, report.policy), []).append(report)
    return groups


def _tier_row(load: float, policy: str, group: Sequence[RunReport]) -> tuple[str, ...]:
    hits = {name: mean([r.tier_hit_rates[name] for r in group]) for name in group[0].tier_hit_rates}
    device = mean([r.hit_rate for r in group]) - sum(hits.values())
    loaded = [mean([r.loaded_bytes[name] for r in group]) / 1e9 for name in hits]
    return (
        f"{load * 100:.0f}",
        policy,
        *(f"{share * 100:.1f}" for share in (device, *hits.values())),
        *(f"{num_gb:.1f}" for num_gb in loaded),
    )


def _row(load: float, policy: str, group: Sequence[RunReport]) -> tuple[str, ...]:
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
