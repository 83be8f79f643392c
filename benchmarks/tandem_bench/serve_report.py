"""The figures of `tandem bench serve`: a table and a plot in the terminal, and a plot in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from tandem_bench.serve_tools import QUANTILES, Distribution, Measured

_BINS = 12
_BAR_WIDTH = 40
_PLOTTED = (("Time to first token", "ttft_ms"), ("Inter-token latency", "inter_token_ms"))


def show(measured: Measured, console: Console, title: str) -> None:
    """Prints a table of all measures, then a histogram of each that has a value per request."""
    console.print(title, highlight=False, soft_wrap=True)
    console.print(_table(measured))
    for message in measured.errors[:5]:
        console.print(f"[red]error[/red]: {message}", highlight=False)
    for name, field in _PLOTTED:
        if samples := getattr(measured, field):
            console.print(_histogram(f"{name}, ms", samples))


def _table(measured: Measured) -> Table:
    table = Table()
    table.add_column("")
    for name in ("mean", *(f"p{q}" for q in QUANTILES)):
        table.add_column(name, justify="right")
    _add(table, "time to first token, ms", measured.ttft)
    _add(table, "inter-token latency, ms", measured.inter_token)
    _add(table, "request latency, ms", measured.latency)
    table.add_section()
    rates = (
        ("requests/s", f"{measured.requests_per_s:.2f}"),
        ("output tokens/s", f"{measured.output_tokens_per_s:.1f}"),
        ("requests answered", str(measured.num_ok)),
        ("requests failed", str(measured.num_failed)),
        ("duration, s", f"{measured.seconds:.1f}"),
    )
    for name, value in rates:
        table.add_row(name, value)
    return table


def _add(table: Table, name: str, of: Distribution | None) -> None:
    values = () if of is None else (of.mean, *(of.quantiles[q] for q in QUANTILES))
    table.add_row(name, *(f"{value:.1f}" for value in values))


def bins(samples: Sequence[float], number: int = _BINS) -> list[tuple[float, float, int]]:
    """Returns (from, to, count) of equal ranges that hold all samples."""
    low, high = min(samples), max(samples)
    width = (high - low) / number or max(abs(high), 1.0) / number
    counts = [0] * number
    for sample in samples:
        counts[min(int((sample - low) / width), number - 1)] += 1
    return [(low + i * width, low + (i + 1) * width, n) for i, n in enumerate(counts)]


def _histogram(title: str, samples: Sequence[float]) -> Table:
    found = bins(samples)
    digits = max(0, 2 - int(math.log10(max(found[-1][1], 1e-3))))
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    table.add_column(justify="right")
    table.add_column(width=_BAR_WIDTH)
    table.add_column(justify="right")
    most = max(count for *_, count in found)
    for low, high, count in found:
        bounds = f"{low:.{digits}f} to {high:.{digits}f}"
        table.add_row(bounds, Bar(most, 0, count, width=_BAR_WIDTH, color="cyan"), str(count))
    return table


def plot(measured: Measured, title: str, file: Path) -> None:
    """Writes a PNG, SVG or PDF: the share of requests within each latency.

    Raises ImportError without matplotlib, and ValueError for another kind of file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, (name, field) in zip(axes, _PLOTTED, strict=True):
        samples = sorted(getattr(measured, field))
        shares = [100 * (i + 1) / len(samples) for i in range(len(samples))]
        axis.step(samples, shares, where="post")
        axis.set(title=name, xlabel="ms", ylim=(0, 100))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("requests within, %")
    figure.suptitle(title)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)
