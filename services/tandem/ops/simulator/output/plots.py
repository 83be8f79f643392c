"""Draws the results of simulations as PNG plots and as one HTML page. Needs the packages of the
extra `simulate`."""

import base64
import html
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tandem.ops.simulator.output.report import RunReport
from tandem.ops.simulator.output.table import COLUMNS, mean, rows

_PLOTS: dict[str, tuple[str, Callable[[RunReport], float]]] = {
    "goodput": ("goodput under SLO, %", lambda r: r.goodput * 100),
    "hits": ("prompt tokens cached or pulled, %", lambda r: (r.hit_rate + r.pulled_rate) * 100),
    "balance": ("prompt tokens of the most loaded worker / mean", lambda r: r.load_tokens),
    "ttft": ("TTFT p90, s", lambda r: r.ttft_s["p90"]),
    "tpot": ("TPOT p90, ms", lambda r: r.tpot_s["p90"] * 1000),
}
_STYLE = """body { font: 15px/1.4 system-ui, sans-serif; max-width: 62em; margin: 2em auto }
td, th { padding: .15em .6em; text-align: right; border-bottom: 1px solid #ddd }
table { border-collapse: collapse } img { width: 49% }"""


def write_plots(reports: Sequence[RunReport], folder: Path) -> list[Path]:
    """Writes one PNG for each entry of `_PLOTS`. A plot has the load on the x axis and one line for
    each policy. Returns the paths."""
    paths = []
    for name, (label, value) in _PLOTS.items():
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for policy in dict.fromkeys(r.policy for r in reports):
            ours = [r for r in reports if r.policy == policy]
            loads = sorted({r.load for r in ours})
            means = [mean([value(r) for r in ours if r.load == load]) for load in loads]
            width = 2.5 if policy == "tandem" else 1.2
            axes.plot([load * 100 for load in loads], means, "o-", lw=width, ms=3, label=policy)
        axes.set_xlabel("load, % of what the workers can carry")
        axes.set_ylabel(label)
        if name == "ttft":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def write_page(
    reports: Sequence[RunReport], title: str, images: Sequence[Path], path: Path
) -> None:
    """Writes an HTML page that contains the table of results and the plots."""
    pictures = "".join(
        f'<img alt="{image.stem}" src="data:image/png;base64,'
        f'{base64.b64encode(image.read_bytes()).decode()}">'
        for image in images
    )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows(reports)
    )
    name = html.escape(title)
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title>"
        f"<style>{_STYLE}</style><h1>{name}</h1>{pictures}"
        f"<table><tr>{head}</tr>{body}</table>"
        "<p>Load and goodput in %; TTFT in s, TPOT in ms; what the columns mean: "
        "docs/simulator.md</p></html>",
        encoding="utf-8",
    )
