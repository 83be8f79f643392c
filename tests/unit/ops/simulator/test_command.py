from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tandem.common.options import read
from tandem.common.perf_model.rates import WindowBytes, WorkerRates
from tandem.common.process import progress
from tandem.ops.simulator import command
from tandem.ops.simulator.options import SimulateOptions
from tests.harness.terminal import Terminal

ROOT = Path(__file__).parents[4]
MOONCAKE = ROOT / "tests" / "data" / "mooncake_small.jsonl"


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem.ops.cli", "simulate", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_writes_a_table_json_plots_and_one_page(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = simulate(
        str(MOONCAKE),
        *("--decode", "2", "--loads", "50,trace", "--requests", "60", "--seeds", "2"),
        *("--policies", "tandem,random", "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert "goodput" in done.stdout
    result = json.loads((out / "simulation.json").read_text())
    assert len(result["reports"]) == 2 * 2 * 2
    assert {r["num_requests"] for r in result["reports"]} == {60}
    page = (out / "simulation.html").read_text()
    assert page.count("data:image/png;base64,") == len(list(out.glob("*.png"))) == 5
    assert "://" not in page


def test_a_terminal_shows_how_far_all_runs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_POLL_S", 0.01)
    arguments = [str(MOONCAKE), "--loads", "50", "--requests", "200", "--policies", "tandem,random"]
    options = read(SimulateOptions, "tandem simulate", arguments)
    with Terminal() as terminal:
        command.simulate(options)
    assert "run 2 of 2: seed 0, load 50%, random" in terminal.text
    assert simulate(*arguments).stderr == ""


def test_pools_that_follow_a_days_load_explain_themselves() -> None:
    options = ["--prefill", "2", "--decode", "2", "--day", "60", "--slo-tpot", "0.001"]
    done = simulate(str(MOONCAKE), *options, "--autoscale")
    assert done.returncode == 0, done.stderr
    *changes, last = done.stdout.splitlines()
    assert "of 60 within the SLO" in last
    assert last.endswith("worker-hours")
    assert all(" h  " in line and " for its " in line for line in changes)


def test_tiers_have_a_table_of_their_own_and_refuse_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandem.ops.simulator.command import main

    tiers = ("--kv-host-memory", "1000000000", "--kv-store", "--kv-host-rate", "1e10")
    options = ("--decode", "2", "--loads", "50", "--policies", "tandem", "--kv-tokens", "6000")
    monkeypatch.setattr("sys.argv", ["simulate", str(MOONCAKE), *options, *tiers])
    main()
    assert "device ┃ host ┃ store ┃ host GB ┃ store GB" in capsys.readouterr().out

    windows = (WindowBytes(2, 100),)
    rates = tmp_path / "rates.json"
    rates.write_bytes(msgspec.json.encode(WorkerRates(block_bytes=1000, windows=windows)))
    more = ("--rates", str(rates), "--kv-disk-size", "1000000")
    monkeypatch.setattr("sys.argv", ["simulate", str(MOONCAKE), *more])
    with pytest.raises(SystemExit):
        main()
    assert "cannot be simulated for a model with sliding windows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        ([str(MOONCAKE), "--policies", "best"], "--policies has unknown names: best; allowed are"),
        ([str(MOONCAKE), "--loads", "-5"], "neither a percentage above 0 nor"),
        ([str(MOONCAKE), "--fault", "1:nobody:down"], "no worker nobody"),
        ([str(MOONCAKE), "--fault", "soon"], "SECONDS:WORKER"),
        ([str(MOONCAKE), "--autoscale", "--decode", "0"], "autoscale-decode-max, which is 0"),
        (
            [str(MOONCAKE), "--kv-host-memory", "1000"],
            "--kv-host-memory is 1000; it must be 0 or at least 67108864",
        ),
    ],
)
def test_a_bad_option_is_named(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tandem.ops.simulator.command import main

    monkeypatch.setattr("sys.argv", ["simulate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said
