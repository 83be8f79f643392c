"""Every part of the first day on a GPU runs, on a CPU with tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day import __main__ as gpu_day
from benchmarks.gpu_day import parts
from benchmarks.gpu_day.parts import PARTS, ROW_MARK, Part

ROOT = Path(__file__).parents[3]
PROCESSES = ("read", "pair", "restart")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.service] if name in PROCESSES else [])
        for name in PARTS
    ],
)
def test_a_part_runs_and_reports(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["parts", name, "--stand-in"])
    monkeypatch.setattr(parts.signal, "signal", lambda *_: None)
    parts.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line.removeprefix(ROW_MARK)) for line in lines if line.startswith(ROW_MARK)]
    assert rows
    for row in rows:
        assert row["what"]
        assert row["goal"] is None or row["ratio"] >= row["goal"], row


ROWS = """
import json, time
from benchmarks.gpu_day.parts import add_row
add_row("first", ratio=0.5, goal=0.25, figure=7)
"""
ENDS = {
    "read": "",
    "pair": "add_row('second', ratio=0.5, goal=0.75)",
    "restart": "raise ValueError('a bug')",
    "decode": "print('hangs', flush=True); time.sleep(60)",
}


def day(
    monkeypatch: pytest.MonkeyPatch, out: Path, names: str, minutes: float = 1.0
) -> tuple[object, dict[str, Any]]:
    """Runs parts of which each has one row and then ends as `ENDS` says. Returns the status and the
    results."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        gpu_day, "command", lambda name, **_: [sys.executable, "-c", ROWS + ENDS[name]]
    )
    arguments = ["--stand-in", "--parts", names, "--out", str(out), "--minutes", str(minutes)]
    monkeypatch.setattr(sys, "argv", ["gpu_day", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu_day.main()
    return ended.value.code, json.loads(out.read_text())


def test_each_part_has_its_results_whatever_happens_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_day, "_PATIENCE", 1)
    monkeypatch.setattr(
        gpu_day, "PARTS", {name: Part("", 3.0 if name == "decode" else 60.0) for name in ENDS}
    )
    # The order in which they are named does not matter.
    status, results = day(monkeypatch, tmp_path / "day.json", "decode,restart,pair,read")
    assert status == 1
    found = results["parts"]
    assert list(found) == list(ENDS)
    assert all(part["rows"][0]["figure"] == 7 for part in found.values())
    assert "error" not in found["read"]
    assert [row["what"] for row in found["pair"]["rows"]] == ["first", "second"]
    assert found["restart"]["error"] == "it ended with status 1"
    assert found["decode"]["error"] == "it did not end within 3 s"
    assert results["device"] == "stand-in"


def test_a_part_that_runs_again_replaces_its_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "day.json"
    status, _ = day(monkeypatch, out, "read,pair")
    assert status == 1, "a goal was missed"
    monkeypatch.setitem(ENDS, "pair", "add_row('second', ratio=0.8, goal=0.75)")
    status, results = day(monkeypatch, out, "pair")
    assert status == 0
    assert list(results["parts"]) == ["read", "pair"]
    assert results["parts"]["pair"]["rows"][1]["ratio"] == 0.8


def test_a_part_for_which_no_time_is_left_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, results = day(monkeypatch, tmp_path / "day.json", "read", minutes=0.01)
    assert status == 1
    assert results["parts"]["read"] == {"rows": [], "error": "not run: no time was left"}
