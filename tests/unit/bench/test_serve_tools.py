"""The programs of `tandem bench serve`: how they are found and called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem_bench.serve_report import bins
from tandem_bench.serve_tools import TOOLS, AIPerf, GuideLLM, ToolError, Work, find_tool

WORK = Work(url="http://127.0.0.1:8000", model="m", tokenizer="/models/m")


def program(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return folder / name


def test_the_first_program_on_the_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match=r"no aiperf or guidellm on the PATH.*pip install aiperf"):
        find_tool()
    guidellm = program(tmp_path, "guidellm")
    assert find_tool()[1] == guidellm
    with pytest.raises(ToolError, match="pip install aiperf"):
        find_tool("aiperf")
    aiperf = program(tmp_path, "aiperf")
    assert [find_tool()[1], find_tool("guidellm")[1]] == [aiperf, guidellm]


def test_a_path_is_a_program_or_an_environment(tmp_path: Path) -> None:
    guidellm = program(tmp_path / "tools" / "bin", "guidellm")
    for path in (guidellm, guidellm.parent, tmp_path / "tools"):
        tool, found = find_tool("", path)
        assert (tool.name, found) == ("guidellm", guidellm)
    with pytest.raises(ToolError, match=f"no aiperf or guidellm at {tmp_path}"):
        find_tool("", tmp_path)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_what_is_asked_is_on_the_command_line(tool: AIPerf | GuideLLM) -> None:
    asked = replace(WORK, requests=71, concurrency=13, input_tokens=257, output_tokens=59, seed=97)
    line = " ".join(tool.arguments(asked, Path("/results")))
    for value in ("127.0.0.1:8000", "/models/m", "71", "13", "257", "59", "97", "/results"):
        assert value in line
    line = " ".join(tool.arguments(replace(asked, rate=2.5, dataset=Path("/d.jsonl")), Path("/r")))
    assert "2.5" in line
    assert "/d.jsonl" in line
    assert "257" not in line


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_missing_and_broken_results_are_an_error(tool: AIPerf | GuideLLM, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="wrote no"):
        tool.read(tmp_path)
    (tmp_path / {"aiperf": "profile_export_aiperf.json"}.get(tool.name, "guidellm.json")).touch()
    with pytest.raises(ToolError, match="is no JSON"):
        tool.read(tmp_path)


def test_guidellm_is_not_given_what_it_would_cut() -> None:
    with pytest.raises(ToolError, match="comma"):
        GuideLLM().arguments(replace(WORK, model="a,b"), Path("/results"))


def test_bins_hold_every_sample() -> None:
    found = bins([1.0, 2.0, 2.0, 13.0], 12)
    assert [count for *_, count in found] == [1, 2, *[0] * 9, 1]
    assert (found[0][0], found[-1][1]) == (1.0, 13.0)
    assert sum(count for *_, count in bins([5.0, 5.0])) == 2
    assert sum(count for *_, count in bins([0.0])) == 1
