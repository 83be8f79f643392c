"""Goodput over load, as a picture: a line for each server or policy. Needs the extra `simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot(
    panels: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, *, load: str, bold: str
) -> None:
    """`panels`: title -> rows, each with `load`, in %, and `goodput`, in %, by name. `load` says
    what 100% is; the line named `bold` stands out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(
        1,
        len(panels),
        figsize=(7 * len(panels), 4.2),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axes, (title, rows) in zip(all_axes[0], panels.items(), strict=True):
        loads = [row["load"] for row in rows]
        for name in rows[0]["goodput"]:
            width = 2.5 if name == bold else 1.2
            values = [row["goodput"][name] for row in rows]
            axes.plot(loads, values, "o-", lw=width, ms=3, label=name)
        axes.set_xlabel(f"load, % of what {load} can carry")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    all_axes[0][0].set_ylabel("goodput under SLO, %")
    figure.savefig(path, dpi=110)
    plt.close(figure)
