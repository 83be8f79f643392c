"""The framework of the benchmarks: options, turns, ratios, results and tables."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_bench.framework import (
    Ratio,
    Report,
    in_turn,
    machine,
    medians,
    quantile,
    ratios,
    read,
    table,
    write,
)

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "benchmarks").rglob("*.py"))
PROGRAM = '''"""What it measures.

    python -m program [--tokens 1]
"""
from __future__ import annotations
from pathlib import Path
from typing import Literal
from tandem_bench.framework import RESULTS, options, run_main

@options
class Options:
    tokens: int = 400
    """Tokens of a prompt."""
    kinds: tuple[Literal["host", "disk, value"], ...] = ("host",)
    cpu_time: bool = False
    output: Path = RESULTS / "program.json"

def main(options: Options = Options()) -> bool:
    print(options.tokens, options.kinds, options.cpu_time, options.output)
    return options.tokens == 0

if __name__ == "__main__":
    run_main(main)
'''


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path)]


def ran(command: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)


def test_a_program_has_its_options_and_its_exit_status(program: list[str]) -> None:
    plain = ran(program)
    assert plain.stdout == "400 ('host',) False benchmarks/results/program.json\n"
    assert plain.returncode == 0
    chosen = ran(program, "--tokens", "0", "--kinds", "disk, value", "host", "--cpu-time")
    assert chosen.stdout == ("0 ('disk, value', 'host') True benchmarks/results/program.json\n")
    assert chosen.returncode == 1


def test_the_help_is_the_docstring_and_those_of_the_options(program: list[str]) -> None:
    told = ran(program, "--help").stdout
    assert "What it measures." in told
    assert "Tokens of a prompt." in told


@pytest.mark.parametrize("wrong", [("--no-such", "1"), ("--tokens", "x"), ("--kinds", "x"), ("1",)])
def test_a_wrong_option_ends_a_program(program: list[str], wrong: tuple[str, ...]) -> None:
    ended = ran(program, *wrong)
    assert ended.returncode == 2
    assert wrong[-1] in ended.stderr or wrong[0] in ended.stderr


def test_ways_take_turns_in_an_order_that_alternates() -> None:
    called: list[str] = []

    def take(name: str) -> int:
        called.append(name)
        return len(called)

    taken = in_turn({"a": lambda: take("a"), "b": lambda: take("b")}, 2)
    assert called == ["a", "b", "b", "a", "a", "b"]
    assert taken == {"a": [4, 5], "b": [3, 6]}


def test_ratios_are_those_of_each_round() -> None:
    assert ratios([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == Ratio(2.5, 3.0, 3.5)
    assert ratios([3.0], [2.0]) == Ratio(1.5, 1.5, 1.5)
    assert str(ratios([3.0], [2.0])) == "1.500 (1.500 to 1.500)"


def test_medians_and_quantiles() -> None:
    assert medians([{"ms": 1.0}, {"ms": 9.0}, {"ms": 2.26}], 1) == {"ms": 2.3}
    assert quantile([5.0, 1.0, 3.0, 2.0], 0.5) == 3.0
    assert quantile([], 0.5) == 0.0


def test_a_report_has_the_machine_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_bench.framework.idle_percent", lambda during_s: 99.0)
    path = tmp_path / "folder" / "results.json"
    Report(path).write(ratio=Ratio(1.0, 2.0, 3.0), folder=tmp_path)
    found = read(path)
    assert found["before"]["idle_percent"] == found["after"]["idle_percent"] == 99.0
    assert found["before"].items() >= json.loads(json.dumps(machine())).items()
    assert found["ratio"] == [1.0, 2.0, 3.0]
    assert found["folder"] == str(tmp_path)
    assert list(path.parent.iterdir()) == [path]


def test_results_that_are_not_there_are_empty(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json") == {}
    write(tmp_path / "some.json", {"rows": 1})
    assert read(tmp_path / "some.json") == {"rows": 1}


def test_a_table_is_markdown() -> None:
    assert table("a | b", [(1, "x")]) == "| a | b |\n|---|---|\n| 1 | x |"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_benchmark_imports_tests(source: Path) -> None:
    assert not re.findall(r"^\s*(?:from|import) tests\b.*", source.read_text(), re.MULTILINE)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_docstring_are_those_of_its_program(source: Path) -> None:
    text = source.read_text()
    usage = ast.get_docstring(ast.parse(text)) or ""
    if source.name == "framework.py":  # the docstring's command is an example
        return
    module = ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for named, options in re.findall(r"python -m (benchmarks\.[\w.]*\w)(.*(?:\n {8}.*)*)", usage):
        assert named == module
        for option in re.findall(r"(?<!\S)\[?--([a-z-]+)", options):
            field = option.replace("-", "_")
            assert f'"--{option}"' in text or re.search(rf"^    {field}: ", text, re.MULTILINE)
