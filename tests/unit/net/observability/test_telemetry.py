from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import httpx2
import pytest

from tandem.errors import ConfigError
from tandem.net.observability.logs import about, configure_logging


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Restores the root logger as pytest set it."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    for handler in handlers:
        root.removeHandler(handler)  # else `force` would close pytest's own
    yield
    root.handlers = handlers
    root.level = level


def test_a_process_that_hangs_writes_its_stacks_when_asked() -> None:
    hangs = """
import os
from tandem.net.observability.logs import configure_logging
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


# Characters that end a line, move the cursor or reorder text somewhere.
ENDS = ("\n", "\r", "\r\n", "\v", "\f", "\b", "\t", "\0", "\x1b[2K", "\x1b]0;x\a", "\x7f")
ENDS += (
    "\x85",
    "\x9b31m",
    "\u2028",
    "\u2029",
    "\u202e",
    "\u2066",
    "\u200b",
    "\ufeff",
    "\U000e0041",
)


def test_text_names_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode-0/io")
    logging.getLogger("a.b").warning("%d things", 3)
    line = capsys.readouterr().err
    assert re.fullmatch(r"20.* WARNING decode-0/io a\.b: 3 things\n", line)


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_requests_of_http_clients_are_not_logged(
    library: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("router-0")
    transport = library.MockTransport(lambda _: library.Response(200))
    with library.Client(transport=transport) as client:
        client.get("http://localhost/")
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_text_from_outside_writes_a_line_or_reaches_the_terminal(
    log_format: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_LOG_FORMAT", log_format)
    configure_logging("router-0")
    forged = "2026-11-28 04:00:00,000 INFO router-0 tandem: forged"
    text = "".join(f"x{end}{forged}" for end in ENDS)
    log = logging.getLogger("a.b")
    log.warning("refused %s", text, extra={"path": text})
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("it fails: %s", text, stack_info=True)
    said = capsys.readouterr().err
    assert forged in said
    assert all(line.isprintable() for line in said.split("\n"))
    begun = [line for line in said.split("\n") if line and not line.startswith(" ")]
    assert len(begun) == 2
    if log_format == "json":
        assert [json.loads(line)["message"].partition("x")[2] for line in begun] == [text[1:]] * 2


@pytest.mark.parametrize(
    ("name", "value"), [("TANDEM_LOG_FORMAT", "xml"), ("TANDEM_LOG_LEVEL", "loud")]
)
def test_wrong_settings_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} is "):
        configure_logging("x")


def test_a_crash_in_native_code_says_where_it_was() -> None:
    crash = (
        "import os, signal; from tandem.net.observability.logs import configure_logging\n"
        "configure_logging('decode-0/engine'); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    ended = subprocess.run([sys.executable, "-c", crash], capture_output=True, text=True)
    assert ended.returncode == -11
    assert "Segmentation fault" in ended.stderr
    assert 'File "<string>", line 2 in <module>' in ended.stderr
