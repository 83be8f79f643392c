"""Bars of waits: on a terminal, late, gone at the end; nowhere else."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tandem.cluster import operate
from tandem.cluster.operate import drain_step, scale_steps
from tandem.common.process import progress
from tandem.common.process.progress import ProgressRow, Waiting
from tests.harness.terminal import Terminal

SEEN_S = 10.0
ERASE_LINE = "\x1b[2K"


def wait_until(is_true: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + SEEN_S
    while not is_true():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_a_terminal_shows_the_rows_as_they_are_and_keeps_none() -> None:
    with Terminal() as terminal:
        with Waiting(ProgressRow("prefill", "1 of [2] ready", 1, 2)) as waiting:
            wait_until(lambda: "1 of [2] ready" in terminal.text)
            waiting.show(ProgressRow("decode-0", "loading: 41% of 5 GB"))
            wait_until(lambda: "loading: 41% of 5 GB" in terminal.text)
            with waiting.hidden():
                hidden_at = len(terminal.text)
            wait_until(lambda: "decode-0" in terminal.text[hidden_at:])
        wait_until(lambda: terminal.text.endswith(ERASE_LINE))


def test_bars_stay_away_until_the_outermost_context_ends() -> None:
    with Terminal() as terminal, Waiting(ProgressRow("redis")) as waiting:
        wait_until(lambda: "redis" in terminal.text)
        with waiting.hidden():
            wait_until(lambda: terminal.text.endswith(ERASE_LINE))
            hidden_at = len(terminal.text)
            with waiting.hidden():
                print("looking for the model", file=sys.stderr)
            print("download", file=sys.stderr)
            wait_until(lambda: "download" in terminal.text)
            assert "redis" not in terminal.text[hidden_at:]
        wait_until(lambda: "redis" in terminal.text[hidden_at:])


def test_a_short_wait_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal() as terminal:
        monkeypatch.setattr(progress, "SHOWN_AFTER_S", 60.0)
        with Waiting(ProgressRow("prefill")) as waiting, waiting.hidden():
            pass
    assert terminal.text == ""


def test_a_file_gets_no_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    with Waiting(ProgressRow("prefill")) as waiting:
        waiting.show(ProgressRow("prefill", "1 of 2", 1, 2))
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_without_redraws_a_bar_is_drawn_when_it_is_shown_and_not_between() -> None:
    with Terminal() as terminal:
        with Waiting(ProgressRow("samples", "of 512", 0, 2), redraws_per_s=0) as waiting:
            wait_until(lambda: "of 512" in terminal.text)
            time.sleep(0.3)  # three redraws, if there were any
            assert terminal.text.count("of 512") == 1
            waiting.show(ProgressRow("samples", "of 2048", 1, 2))
            wait_until(lambda: "of 2048" in terminal.text)
            with waiting.hidden():
                hidden_at = len(terminal.text)
                waiting.show(ProgressRow("samples", "of 8192", 2, 2))
                assert "of 8192" not in terminal.text[hidden_at:]
            wait_until(lambda: "of 8192" in terminal.text)
        wait_until(lambda: terminal.text.endswith(ERASE_LINE))


def test_a_row_that_is_polled_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_POLL_S", 0.01)
    looks: list[int] = []

    def look() -> ProgressRow:
        looks.append(len(looks))
        return ProgressRow("simulation", f"look {len(looks)}.", len(looks), 1e9)

    with Terminal() as terminal, Waiting() as waiting, waiting.polling(look):
        wait_until(lambda: any(f"look {n}." in terminal.text for n in range(10, len(looks))))
    seen = len(looks)
    time.sleep(0.05)
    assert len(looks) == seen
    with Waiting() as waiting, waiting.polling(look):  # standard error is no terminal
        time.sleep(0.05)
    assert len(looks) == seen


def pool(wanted: int, running: int, ready: int) -> dict[str, Any]:
    return {"wanted": wanted, "running": running, "ready": ready, "agents": [{}] * running}


def state(
    pools: dict[str, Any], rows: list[dict[str, str]] | None = None, held: int | None = None
) -> dict[str, Any]:
    load = {"num_running": held, "num_waiting": 0, "num_leases": 0}
    worker = {"worker_id": "decode-0", "host": "h", "pid": 1, "started_at": 1.0, "load": load}
    workers = [] if held is None else [worker]
    return {"pools": pools, "known_workers": rows or [], "workers": workers}


def row(worker_id: str, told: str, note: str = "") -> dict[str, str]:
    return {"worker_id": worker_id, "pool": worker_id[:-2], "state": told, "note": note}


def test_a_pool_that_grows_and_one_that_shrinks_have_a_bar() -> None:
    at_first = state({"prefill": pool(4, 1, 1), "decode": pool(1, 3, 3), "router": pool(1, 1, 0)})
    rows = [row("prefill-1", "loading", "41% of 5 GB of weights"), row("decode-2", "draining")]
    well = [row("prefill-0", "ready"), row("decode-9", "stopped"), row("other-0", "loading")]
    now = state({"prefill": pool(4, 4, 2), "decode": pool(1, 2, 2)}, [*rows, *well])
    assert scale_steps(at_first, now, {"prefill": 4, "decode": 1}) == [
        ProgressRow("prefill", "4 running, 2 ready, 4 wanted", 1, 3),
        ProgressRow("decode", "2 running, 2 ready, 1 wanted", 1, 2),
        ProgressRow("prefill-1", "loading: 41% of 5 GB of weights"),
        ProgressRow("decode-2", "draining"),
    ]


def test_a_drain_tells_what_is_left() -> None:
    drains = [row("decode-0", "draining", "2 sequences and 0 leases are left")]
    step = drain_step(state({}, held=5), state({}, drains, held=2), "decode-0")
    assert step == ProgressRow("decode-0", "draining: 2 sequences and 0 leases are left", 3, 5)
    assert drain_step(state({}, held=0), state({}), "decode-0") == ProgressRow(
        "decode-0", "draining"
    )


@contextmanager
def router(answers: Callable[[str], Any]) -> Iterator[str]:
    """Serves what `answers` makes of a method, and yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers(self.command)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_scale_shows_what_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operate, "_POLL_INTERVAL_S", 0.02)
    starts = state({"decode": pool(2, 2, 1)}, [row("decode-1", "loading", "41% of 5 GB")])
    with Terminal() as terminal:
        done = lambda: "decode-1" in terminal.text  # noqa: E731
        with router(lambda _: state({"decode": pool(2, 2, 2)}) if done() else starts) as url:
            operate.scale_pools(url, ["decode=2"], deadline_s=SEEN_S)
        for text in ("2 running, 1 ready, 2 wanted", "loading: 41% of 5 GB"):
            assert text in terminal.text
    assert capsys.readouterr().out == "decode=2\n"


def test_drain_shows_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operate, "_POLL_INTERVAL_S", 0.02)
    drains = state({}, [row("decode-0", "draining", "3 sequences and 0 leases are left")], held=3)
    with Terminal() as terminal:
        done = lambda: "3 sequences" in terminal.text  # noqa: E731
        with router(lambda _: state({}) if done() else drains) as url:
            operate.drain_worker(url, "decode-0", deadline_s=SEEN_S)
    assert capsys.readouterr().out == "decode-0 is drained and has ended\n"


def test_set_role_shows_that_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal() as terminal:

        def answer(_: str) -> dict[str, Any]:
            wait_until(lambda: "changes its pool" in terminal.text)
            return {"role": "prefill", "seen_s": 0.1}

        with router(answer) as url:
            operate.set_role(url, "decode-0", "prefill")
    assert capsys.readouterr().out == "decode-0 is now in the prefill pool (this took 0.10 s)\n"
