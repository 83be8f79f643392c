from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tandem.errors import ConfigError
from tandem.observability.logs import about, configure_logging


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Restores the root logger as pytest set it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        root.removeHandler(handler)  # else `force` would close pytest's own
    yield
    root.handlers, root.level = handlers, level


def test_a_process_that_hangs_writes_its_stacks_when_asked() -> None:
    hangs = """
import os
from tandem.observability.logs import configure_logging
configure_logging("decode-0/engine")
def waits_for_ever():
    print("begun", flush=True)
    os.read(0, 1)
waits_for_ever()
"""
    with subprocess.Popen(
        [sys.executable, "-c", hangs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGUSR2)
        lines = iter(process.stderr.readline, "")
        assert any("in waits_for_ever" in line for line in lines)
        _, rest = process.communicate("x")
        assert process.returncode == 0, rest  # it went on


def test_text_names_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode-0/io")
    logging.getLogger("a.b").warning("%d things", 3)
    line = capsys.readouterr().err
    assert re.fullmatch(r"20.* WARNING decode-0/io a\.b: 3 things\n", line)


def test_json_has_the_request_and_what_else_was_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_LOG_FORMAT", "json")
    configure_logging("decode-0/engine")
    log = logging.getLogger("a.b")
    log.info("line\nbreak", extra={**about("r1#0"), "odd": 1 + 2j, "lazy": lambda: {"n": 3}})
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it %s", "fails", extra=about("a chain"))
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "INFO",
        "process": "decode-0/engine",
        "logger": "a.b",
        "message": "line\nbreak",
        "request_id": "r1",
        "odd": "(1+2j)",
        "lazy": {"n": 3},
    }
    assert second["message"] == "it fails"
    assert second["exception"].endswith("ValueError: broken")
    assert "request_id" not in second


@pytest.mark.parametrize(
    ("name", "value"), [("TANDEM_LOG_FORMAT", "xml"), ("TANDEM_LOG_LEVEL", "loud")]
)
def test_wrong_settings_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} is "):
        configure_logging("x")


def test_a_crash_in_native_code_says_where_it_was() -> None:
    crash = (
        "import os, signal; from tandem.observability.logs import configure_logging\n"
        "configure_logging('decode-0/engine'); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    ended = subprocess.run([sys.executable, "-c", crash], capture_output=True, text=True)
    assert ended.returncode == -11
    assert "Segmentation fault" in ended.stderr
    assert 'File "<string>", line 2 in <module>' in ended.stderr
