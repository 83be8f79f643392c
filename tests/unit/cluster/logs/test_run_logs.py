"""Logs of runs: kept after the end, bounded, and found by a worker's id."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from tandem.cluster.logs.run_logs import (
    RUNS_KEPT,
    Addresses,
    RunLogs,
    find_address,
    find_log,
    find_run,
    lines,
    log_names,
    runs_folder,
    show_log,
)
from tandem.errors import OperateError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(tmp_path: Path, name: str, text: str) -> RunLogs:
    folder = tmp_path / name
    folder.mkdir()
    made = RunLogs(folder, name)
    (folder / "logs" / "decode-0.log").write_text(text)
    return made


def test_a_log_stays_when_its_run_folder_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "a", "first\n").close()
    shutil.rmtree(tmp_path / "a")
    path = find_log(find_run(), "decode-0")
    assert path is not None
    show_log(path, follow=False)
    assert capsys.readouterr().out == "first\n"


def test_the_run_of_the_meant_cluster_is_found(tmp_path: Path) -> None:
    assert find_run() is None
    first = run(tmp_path, "local-1", "x")
    first.announce(Addresses("http://h:1", "http://h:2"))
    second = run(tmp_path, "local-2", "x")
    second.announce(Addresses("http://h:3", "http://h:4"))
    third = run(tmp_path, "local-3", "x")  # has announced no address, because it is not ready
    assert find_run(cluster_id="local-1") == first.folder
    assert find_run(cluster_id="local-9") is None
    assert find_run(admin_url="http://h:4") == second.folder
    assert find_run(admin_url="http://h:6") is None
    assert find_run() in (second.folder, third.folder)  # they began in the same second
    for each in (first, second, third):
        each.close()


def test_the_last_runs_are_kept_and_those_that_live(tmp_path: Path) -> None:
    living = run(tmp_path, "0-lives", "x")
    for number in range(1, RUNS_KEPT + 3):
        run(tmp_path, f"{number}", "x").close()
    kept = sorted(path.name.partition("-")[2] for path in runs_folder().iterdir())
    newest = [str(number) for number in range(3, RUNS_KEPT + 3)]
    assert kept == ["0-lives", *newest]
    living.close()
    run(tmp_path, "last", "x").close()
    assert len(list(runs_folder().iterdir())) == RUNS_KEPT


def test_commands_find_the_one_cluster_that_runs(tmp_path: Path) -> None:
    assert find_address("admin", "default") == "default"
    first = run(tmp_path, "first", "x")
    first.announce(Addresses("http://h:1", "http://h:2"))
    assert find_address("http", "default") == "http://h:1"
    assert find_address("admin", "default") == "http://h:2"
    second = run(tmp_path, "second", "x")
    assert find_address("http", "default") == "http://h:1", "the second one still starts"
    second.announce(Addresses("http://h:3", "http://h:4"))
    with pytest.raises(
        OperateError, match=r"2 clusters run on this machine; .* http://h:2 or http://h:4"
    ):
        find_address("admin", "default")
    first.close()
    assert find_address("http", "default") == "http://h:3"
    second.close()
    assert find_address("http", "default") == "default"


def test_a_log_is_found_by_the_name_of_its_process(tmp_path: Path) -> None:
    assert log_names(find_run()) == []
    assert find_log(find_run(), "decode-0") is None
    run(tmp_path, "a", "x").close()
    assert log_names(find_run()) == ["decode-0"]
    for name in ("decode-1", "../../decode-1"):
        assert find_log(find_run(), name) is None


def test_a_log_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    path.write_text("one\n")
    is_over = threading.Event()
    followed = lines(path, is_over.is_set)
    assert next(followed) == "one\n"
    with path.open("a") as stream:
        stream.write("two\n")
    assert next(followed) == "two\n"
    is_over.set()
    assert list(followed) == []


def test_without_a_place_for_them_logs_stay_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    folder = tmp_path / "run"
    folder.mkdir()
    made = RunLogs(folder, "a")
    assert made.folder == folder / "logs"
    made.close()
