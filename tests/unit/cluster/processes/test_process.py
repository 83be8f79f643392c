"""Detached processes: nobody's children, found by their records, never mistaken for others."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tandem.cluster.processes import process
from tandem.cluster.processes.process import DetachedProcess
from tandem.errors import ConfigError

WAIT = [sys.executable, "-S", "-c", "import signal; print('up', flush=True); signal.pause()"]
DEAF = [
    sys.executable,
    "-S",
    "-c",
    "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()",
]
Start = Callable[[list[str]], DetachedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[DetachedProcess] = []

    def start_one(command: list[str]) -> DetachedProcess:
        made.append(process.start("decode-0", command, tmp_path, {"MARK": "1"}))
        while not made[-1].log_path.read_text():
            assert not made[-1].wait(0.01)
        return made[-1]

    yield start_one
    for one in made:
        one.send(signal.SIGKILL)
        assert one.wait(5)
        one.close()


def test_a_started_process_is_in_its_own_session_and_no_child_of_ours(start: Start) -> None:
    started = start(WAIT)
    seen = psutil.Process(started.pid)
    assert os.getsid(started.pid) == started.pid
    assert seen.ppid() != os.getpid()
    assert seen.environ()["MARK"] == "1"
    assert started.log_path.read_text() == "up\n"


def test_it_is_found_again_while_it_lives_only(start: Start, tmp_path: Path) -> None:
    started = start(WAIT)
    found = process.find("decode-0", tmp_path)
    assert found is not None
    assert found.pid == started.pid
    found.send(signal.SIGKILL)
    assert found.wait(5)
    found.close()
    assert process.find("decode-0", tmp_path) is None


def test_a_pid_that_another_process_got_is_not_taken_for_ours(tmp_path: Path) -> None:
    record = tmp_path / "processes" / "decode-0.json"
    record.parent.mkdir()
    record.write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1}))
    assert process.find("decode-0", tmp_path) is None


def test_without_a_record_there_is_none(tmp_path: Path) -> None:
    assert process.find("decode-0", tmp_path) is None


def test_stop_drains_and_kills_what_does_not_drain(start: Start) -> None:
    gentle = start(WAIT)
    gentle.stop(30.0)
    assert gentle.wait(0)
    gentle.log_path.unlink()
    deaf = start(DEAF)
    deaf.stop(0.1)
    assert deaf.wait(0)


def test_a_wait_ends_when_it_is_woken(start: Start) -> None:
    started = start(WAIT)
    wake = os.eventfd(1)
    assert not started.wait(None, wake)
    os.close(wake)


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decode-0: /no/such/program cannot be started"):
        process.start("decode-0", ["/no/such/program"], tmp_path, {})


def test_settings_of_ray_are_not_handed_on() -> None:
    kept = process.child_environment({"RAY_JOB_ID": "1", "PATH": "/bin", "TANDEM_X": "y"})
    assert kept == {"PATH": "/bin", "TANDEM_X": "y"}


def test_an_operators_key_is_not_handed_on() -> None:
    """`tandem up` may run in a shell that has the variable; a worker would be an operator."""
    for pool in (None, "router", "decode"):
        kept = process.child_environment({"TANDEM_API_KEY": "tandem-id-secret"}, pool)
        assert "TANDEM_API_KEY" not in kept


def test_a_process_gets_the_redis_user_of_its_kind_alone() -> None:
    given = {"TANDEM_REDIS_URL": "c", "TANDEM_REDIS_URL_OF_router": "r"}
    given |= {"TANDEM_REDIS_URL_OF_worker": "w"}
    assert process.child_environment(given, "router") == {"TANDEM_REDIS_URL": "r"}
    for role in ("prefill", "decode"):
        assert process.child_environment(given, role) == {"TANDEM_REDIS_URL": "w"}
    assert process.child_environment({"TANDEM_REDIS_URL": "c"}, "decode") == {
        "TANDEM_REDIS_URL": "c"
    }


def test_the_last_line_of_a_log_is_quoted_if_it_is_a_warning_of_the_failure(
    tmp_path: Path,
) -> None:
    log = tmp_path / "decode-0.log"
    assert process.last_warning(log) == ""
    log.write_text("x" * 20_000 + "\nfirst\nMemoryError: no room\n\n")
    assert process.last_warning(log) == "MemoryError: no room"
    log.write_text("y" * 20_000)
    assert set(process.last_warning(log)) == {"y"}
    assert len(process.last_warning(log)) < 1000
    start = "2026-11-29 00:42:10,089 {} decode-0/io tandem.worker: the engine {}\n"
    log.write_text(start.format("INFO", "works"))
    assert process.last_warning(log) == "", "it explains nothing"
    log.write_text('{"level": "INFO", "message": "works"}\n')
    assert process.last_warning(log) == ""
    log.write_text(start.format("INFO", "works") + start.format("ERROR", "is gone"))
    assert process.last_warning(log) == "the engine is gone"
    os.utime(log, (0, time.time() - 60))
    assert process.last_warning(log) == "", "it was logged long before the end"
