"""Benchmarks show on a terminal how far they are, between what they time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tandem.common.process.progress import ProgressRow, Waiting
from tandem_bench import engine
from tandem_bench.transfer import _Rows
from tests.harness.terminal import Terminal
from tests.tiny_models import make_random_speaker

LIMITS = {"gflops": 1.0, "read_gb_per_s": 1.0}


def test_each_sample_of_the_engine_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "limits", lambda threads: LIMITS)
    monkeypatch.setattr(engine, "idle_percent", lambda during_s: 100.0)
    told: list[ProgressRow] = []
    show = Waiting.show

    def listening(waiting: Waiting, *steps: ProgressRow) -> None:
        told.extend(steps)
        show(waiting, *steps)

    monkeypatch.setattr(Waiting, "show", listening)
    model, output = make_random_speaker(tmp_path).path, tmp_path / "out.json"
    kinds = {"prompts": "16,32", "batches": "1", "modes": "native fp32,torch fp32"}
    with Terminal() as terminal:
        engine.main(model=str(model), **kinds, repeats=2, output=output)
    samples = [step for step in told if "thread(s): " in step.note]
    assert [step.done for step in samples] == list(range(2 * 3 * 3))
    assert {step.total for step in samples} == {2 * 3 * 3}
    assert samples[-1].note == "torch fp32, 1 thread(s): decode 1"
    assert "its own products and reads" in terminal.text
    assert "tokens/s" in capsys.readouterr().out
    assert len(json.loads(output.read_text())["rows"]) == 2


def test_each_row_of_the_transfers_is_a_line_and_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal() as terminal, Waiting() as waiting:
        rows = _Rows(waiting, Console(), 2)
        rows.tell("m: NIXL, 1 blocks")
        rows.tell("m: gRPC, 1 blocks")
    assert capsys.readouterr().out.splitlines() == ["m: NIXL, 1 blocks", "m: gRPC, 1 blocks"]
    assert "m: gRPC, 1 blocks" in terminal.text
