"""The framework of all benchmarks: options, turns, the machine's description, results and tables.

    @options
    class Options:
        repeats: int = 5
        \"\"\"Rounds in which each way takes one turn.\"\"\"
        output: Path = RESULTS / "name.json"

    def main(options: Options = Options()) -> None:
        report = Report(options.output)
        taken = in_turn({"with": one, "without": other}, options.repeats)
        report.write(ratio=ratios(taken["without"], taken["with"]))

    if __name__ == "__main__":
        run_main(main)

Programs run in the root of the repository: `python -m benchmarks.engine.step_loop --help`.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, dataclass_transform

RESULTS = Path("benchmarks") / "results"
# They decide the speed of products in fp32, bf16 and bytes.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx_vnni", "avx512_vnni", "amx_int8")

_Way = TypeVar("_Way")
_Taken = TypeVar("_Taken")
_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[_Class]) -> type[_Class]:
    """Makes a class of fields the options of a program. A field's docstring is its help."""
    from cyclopts import Parameter

    return Parameter(name="*")(dataclass(frozen=True, kw_only=True)(cls))


def run_main(main: Callable[..., object]) -> None:
    """Calls `main` with the options of the command line, and exits with the status that it returns.

    The help is the docstring of the module of `main`. A wrong option ends the program with status
    2. SIGTERM ends it as an exception does, so that what it started is closed.
    """
    from cyclopts import App, Parameter

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    app = App(
        help=sys.modules[main.__module__].__doc__,
        help_format="plaintext",
        default_parameter=Parameter(negative=(), consume_multiple=True),
        version_flags=(),
    )
    app.default(main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))


def words(text: str) -> list[str]:
    """Returns the words of an option such as `near,far`."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Returns the numbers of an option such as `1,8,32`."""
    return [int(word) for word in words(text)]


def in_turn(
    ways: Mapping[_Way, Callable[[], _Taken]], rounds: int, *, warm_up: int = 1
) -> dict[_Way, list[_Taken]]:
    """Calls each way once a round, in an order that alternates, and returns what it returned by
    round.

    A machine that becomes busy slows all ways of a round, so compare them round by round. The
    rounds of the warm-up are not returned.
    """
    taken: dict[_Way, list[_Taken]] = {way: [] for way in ways}
    for number in range(warm_up + rounds):
        for way in ways if number % 2 == 0 else reversed(list(ways)):
            found = ways[way]()
            if number >= warm_up:
                taken[way].append(found)
    return taken


def medians(rows: Sequence[Mapping[str, float]], digits: int | None = None) -> dict[str, float]:
    """Returns the median of each figure over rows that have the same figures."""
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return found if digits is None else {k: round(v, digits) for k, v in found.items()}


class Ratio(NamedTuple):
    """The median of the ratios of each round, and their quartiles."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratios(ones: Iterable[float], others: Iterable[float]) -> Ratio:
    """Returns the ratio of two ways, whose figures are in the order of the rounds."""
    found = [one / other for one, other in zip(ones, others, strict=True)]
    if len(found) == 1:
        return Ratio(*found * 3)
    return Ratio(*statistics.quantiles(found, n=4, method="inclusive"))


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that this share of all does not exceed; 0 if there are none."""
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def idle_percent(during_s: float) -> float:
    """Returns the idle share of all cores over this time."""
    import psutil

    return float(psutil.cpu_times_percent(during_s).idle)


def machine() -> dict[str, Any]:
    """Returns the processor's name, its cores and the instructions that matter."""
    text = Path("/proc/cpuinfo").read_text()
    name = next((line for line in text.splitlines() if line.startswith("model name")), ": unknown")
    return {
        "cpu": name.split(": ")[1],
        "cores": os.cpu_count(),
        "flags": [flag for flag in _FLAGS if flag in text],
        "system": platform.platform(),
    }


def conditions() -> dict[str, Any]:
    """Returns the machine and how quiet it is, which takes two seconds. Call it while nothing of
    the benchmark runs."""
    idle = round(idle_percent(2.0), 1)
    return {**machine(), "idle_percent": idle, "load_average": os.getloadavg()}


def write(path: Path, results: Any) -> None:
    """Writes results as JSON. A reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1, default=_plain) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Returns the results of earlier runs; empty if there are none."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


class Report:
    """The results file of a run, with the machine's conditions before and after it."""

    def __init__(self, path: Path | None) -> None:
        """Nothing is written if there is no path."""
        self._path = path
        self.before = conditions()

    def write(self, **figures: Any) -> None:
        if self._path is not None:
            write(self._path, {"before": self.before, "after": conditions(), **figures})
            print(f"written to {self._path}", file=sys.stderr)


def table(columns: str, rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; `columns` are separated by ` | `."""
    lines = [f"| {columns} |", "|---" * (columns.count(" | ") + 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
