"""What an operator sees of a running cluster: status, page, alerts and logs.

The page is read like a browser does: one viewer, a `full` event and then deltas.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tandem.cluster.operate import show_status
from tandem.errors import OperateError
from tests.harness.prometheus import Prometheus

NAMED_WITHIN_S = 10.0
SURFACES = ("page", "status", "alert", "log")
_POLL_S = 0.2
_QUIET_S = 6.0


@dataclass(frozen=True)
class Words:
    """Regular expressions that match a cause; one of `alerts` must be active."""

    page: str
    status: str
    log: str
    alerts: frozenset[str]


@dataclass
class Seen:
    """The first text that named the cause on each surface, and after how many seconds."""

    found: dict[str, tuple[float, str]] = field(default_factory=dict)

    def line(self, surface: str) -> str:
        at, text = self.found.get(surface, (0.0, ""))
        return f"{text} ({at:.1f} s)" if text else "nothing"


class Page:
    """The operators' page as displayed; follows the feed until `close`."""

    def __init__(self, admin_url: str) -> None:
        self._url = f"{admin_url}/v1/cluster/live"
        self._is_closed = False
        self.head: dict[str, Any] = {}
        self.workers: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self._columns: list[str] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(10)

    def lines(self, since: float) -> list[str]:
        """The headline, the states of the workers, and the events after `since` (seconds since the
        epoch)."""
        rows = [f"{name}: {w['state']}: {w['note']}" for name, w in list(self.workers.items())]
        events = [e for e in list(self.events) if e["at"] > since]
        event_lines = [f"event {e['kind']}: {e['about']}: {e['text']}" for e in events]
        return [self.head.get("headline", ""), *rows, *event_lines]

    def _follow(self) -> None:
        while not self._is_closed:
            with (
                contextlib.suppress(httpx.TransportError),
                httpx.stream("GET", self._url, timeout=5) as reply,
            ):
                for line in reply.iter_lines():
                    if line.startswith("data:"):
                        self._take(json.loads(line[5:]))
                    if self._is_closed:
                        return
            time.sleep(_POLL_S)

    def _take(self, parts: dict[str, Any]) -> None:
        self._columns = parts.get("worker_columns", self._columns)
        if "worker_columns" in parts:
            self.workers = {}
        self.head = parts.get("head", self.head)
        self.events = parts.get("events", self.events)
        for name, row in parts.get("workers", {}).items():
            self.workers[name] = dict(zip(self._columns, row, strict=True))
        for name in parts.get("gone", ()):
            self.workers.pop(name, None)


class Surfaces:
    """All surfaces of a cluster; `logs` are folders and files."""

    def __init__(self, admin_url: str, logs: Iterable[Path], prometheus: Prometheus | None) -> None:
        self._admin_url = admin_url
        self._logs = list(logs)
        self._prometheus = prometheus
        self.page = Page(admin_url)

    def close(self) -> None:
        self.page.close()

    def wait_well(self, deadline_s: float = 60.0) -> None:
        """Waits until the page reports no problem."""
        give_up_at = time.monotonic() + deadline_s
        while not self.page.head.get("is_well") or not self.page.head["headline"].startswith("All"):
            assert time.monotonic() < give_up_at, self.page.lines(0.0)
            time.sleep(_POLL_S)

    def log_sizes(self) -> dict[Path, int]:
        return {file: file.stat().st_size for file in self._files()}

    def alerts(self) -> set[str]:
        """Lists the alerts whose expression is true, with their workers."""
        if self._prometheus is None:
            return set()
        labels = [alert["labels"] for alert in self._prometheus.alerts()]
        return {" ".join(filter(None, (a["alertname"], a.get("worker")))) for a in labels}

    def quiet_alerts(self, words: Words) -> set[str]:
        """Waits until the alerts in `words` are inactive, at most _QUIET_S, and lists the active
        alerts."""
        give_up_at = time.monotonic() + _QUIET_S
        while time.monotonic() < give_up_at:
            if not any(alert.split()[0] in words.alerts for alert in self.alerts()):
                break
            time.sleep(_POLL_S)
        return self.alerts()

    def watch(self, words: Words, sizes: dict[Path, int], alerts: set[str]) -> Seen:
        """Watches for at most 10 s, until each surface has named the cause. `sizes` and `alerts`
        are from before the fault."""
        seen = Seen()
        began = time.monotonic()
        since = time.time() - 1.0
        wanted = {"page", "status", "log", *(["alert"] if self._prometheus else [])}
        while (now := time.monotonic() - began) < NAMED_WITHIN_S and wanted - seen.found.keys():
            looks = {
                "page": lambda: _first(words.page, self.page.lines(since)),
                "status": lambda: _first(words.status, self._status(since)),
                "log": lambda: _first(words.log, self._new_lines(sizes)),
                "alert": lambda: self._new_alert(words, alerts),
            }
            for surface in wanted - seen.found.keys():
                if text := looks[surface]():
                    seen.found[surface] = (now, text)
            time.sleep(_POLL_S)
        return seen

    def _new_alert(self, words: Words, before: set[str]) -> str:
        new = sorted(a for a in self.alerts() - before if a.split()[0] in words.alerts)
        return new[0] if new else ""

    def _status(self, since: float) -> list[str]:
        """The output of `tandem status`, without events before `since`."""
        screen = io.StringIO()
        with contextlib.redirect_stdout(screen), contextlib.suppress(OperateError):
            show_status(self._admin_url)
        lines = [re.sub(r" {2,}", "  ", line) for line in screen.getvalue().splitlines()]
        return [line for line in lines if not _is_older(line, time.time() - since)]

    def _files(self) -> list[Path]:
        found = [f for p in self._logs for f in (p.glob("*.log") if p.is_dir() else [p])]
        return [file for file in found if file.exists()]

    def _new_lines(self, sizes: dict[Path, int]) -> list[str]:
        lines: list[str] = []
        for file in self._files():
            with file.open("rb") as stream:
                stream.seek(sizes.get(file, 0))
                lines += stream.read().decode(errors="replace").splitlines()
        return lines


def _is_older(line: str, seconds: float) -> bool:
    """Says whether a line of `tandem status` is an event that is older than this."""
    age = re.match(r" +(\d+) s ago: ", line)
    return age is not None and int(age[1]) > seconds + 1.0


def problem(what: str, *alerts: str) -> Words:
    """Words of a cause that all surfaces name in the same way."""
    return Words(what, what, what, frozenset(alerts or ("TandemWorkerProblem",)))


def report(what: str, seen: Seen) -> list[str]:
    """Prints the text of each surface as a row of the table in docs/faults.md. Returns the surfaces
    that did not name the fault."""
    cells = [seen.line(surface).replace("|", "/") for surface in SURFACES]
    print(f"\n| {what} | {' | '.join(cells)} |", flush=True)
    return [surface for surface in SURFACES if surface not in seen.found]


def _first(pattern: str, lines: Iterable[str]) -> str:
    """The first line that matches the pattern; empty if none does."""
    return next((line.strip() for line in lines if re.search(pattern, line)), "")
