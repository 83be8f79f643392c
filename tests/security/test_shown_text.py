"""Text of clients in logs and on operators' screens, over real sockets: it forges no line, and
sends no control codes to a terminal."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import subprocess
import sys
from urllib.parse import quote

import httpx
import pytest

from tandem.net.observability.logs import _formatter
from tests.harness.keyed_routers import Routers, call, create, ready, routers, until

__all__ = ["routers"]
pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

FORGED = (
    "2026-11-28 04:00:00,000 INFO router-0 tandem.net.security: change by operator: key created"
)
ENDS = ("\n", "\r", "\x1b]0;PWNED\x07", "\x1b[2J", "\x9b31m", "\u2028", "\u2029", "\u202e", "\x85")
MARKUP = "[bold red]markup[/][link=https://evil.example]x[/link] :warning:"


async def test_paths_forge_no_line_and_no_screen(routers: Routers) -> None:
    """Checks text in a path or header as it appears in the log, the audit trail and the records."""
    one = await routers.start("r1")
    await ready(one)
    admin = routers.admin_of(one)
    operator = await create(routers.admin_of(one), "ops", "operator")
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(_formatter("r1"))
    logging.getLogger().addHandler(handler)
    paths = [f"/v1/requests/{end}{FORGED}" for end in ENDS] + [f"/v1/requests/{MARKUP}"]
    async with httpx.AsyncClient(base_url=one) as http:
        for path in paths:
            assert (await http.get(quote(path))).status_code == 401
        headers = [(b"x-forwarded-for", b"1.2.3.4\x9b31m"), (b"authorization", b"Bearer \xc2\x9b")]
        assert (await http.get("/v1/models", headers=headers)).status_code == 401
    logging.getLogger().removeHandler(handler)
    lines = [line for line in log.getvalue().split("\n") if line]
    assert len(lines) == len(paths) + 1
    assert all(line.isprintable() and "refused" in line for line in lines)

    async def is_told() -> bool:
        told = (await call(admin, operator, "/v1/cluster/audit", "GET")).json()["entries"]
        return len([e for e in told if e["outcome"] == "invalid_api_key"]) == len(paths) + 1

    await until(is_told)
    for words in (["audit"], ["audit", "--limit", "100"]):
        shown = await run(*words, "--url", admin, key=operator)
        assert all(line.isprintable() for line in shown.split("\n"))
        assert MARKUP[:20] in shown, "rich reads no markup in it"
        assert not any(line.startswith(FORGED[:20]) for line in shown.split("\n"))


async def run(*words: str, key: str) -> str:
    """Runs a command and returns its output."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tandem.ops.cli", *words],
        env={**os.environ, "TANDEM_API_KEY": key, "COLUMNS": "200"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()
