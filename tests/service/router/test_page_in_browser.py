"""The operators' page in a real browser, where there is one: Debian's chromium and playwright.

`TANDEM_AXE` names axe.min.js of axe-core, for the check of accessibility.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.cluster import free_port

pytestmark = pytest.mark.service

CHROMIUM = shutil.which("chromium")
DEADLINE_S = 30.0
# Draws 1,000 workers while an event comes after each task; returns how many are on the picture.
DRAWN = """async () => {
  const {take} = await import("./page/feed.js"), {showPicture} = await import("./page/picture.js");
  const drawn = new Set(), canvas = CanvasRenderingContext2D.prototype, stroke = canvas.strokeRect;
  canvas.strokeRect = (x, y) => drawn.add(`${x} ${y}`);
  const ids = Array.from({length: 1000}, (_, i) => `decode-${i}`);
  const workers = Object.fromEntries(ids.map(id => [id, ["decode", "ready", 50]]));
  const worker_columns = ["role", "state", "kv_used_percent"];
  take("full", {workers, worker_columns, sample_columns: [], step_s: 5, now: 0});
  for (let i = 0; i < 6; i++) showPicture()();
  canvas.strokeRect = stroke;
  return drawn.size;
}"""

# Draws two workers that are ready, one of them in trouble; returns the colors by place.
COLORS = """async () => {
  const {take} = await import("./page/feed.js"), {showPicture} = await import("./page/picture.js");
  const drawn = [], canvas = CanvasRenderingContext2D.prototype, stroke = canvas.strokeRect;
  canvas.strokeRect = function (x, y) { drawn.push({x, y, style: this.strokeStyle}); };
  const row = note => ["decode", "ready", 50, note];
  const workers = {"decode-0": row(""), "decode-1": row("its disk is full")};
  const worker_columns = ["role", "state", "kv_used_percent", "note"];
  take("full", {workers, worker_columns, sample_columns: [], step_s: 5, now: 0});
  for (let rest = showPicture(); rest; rest = rest());
  canvas.strokeRect = stroke;
  return drawn.sort((a, b) => a.x - b.x || a.y - b.y).map(each => each.style);
}"""
# Shows a decision of the autoscaler; returns the line.
AUTOSCALE = """async () => {
  const {state} = await import("./page/feed.js"), {showPools} = await import("./page/workers.js");
  const why = "decode 1 -> 3 for its queue: wanted 3 of 1..8; load 0.10";
  state.head.autoscale = {mode: "dry-run", decisions: [{pool: "decode", size: 3, why}]};
  showPools();
  const line = document.getElementById("autoscale");
  return line.hidden ? "" : line.textContent;
}"""


# Shows a worker with tiers and one of an older router's feed; returns the lines of their KV.
LEVELS = """async () => {
  const {take} = await import("./page/feed.js"), {showWorkers} = await import("./page/workers.js");
  const tiers = [["host", 250, 1000], ["store", 1234, 65536]];
  const seen = columns => {
    const workers = {"decode-0": ["decode", "ready", 50, "h", tiers].slice(0, columns.length)};
    take("full", {workers, worker_columns: columns, sample_columns: [], step_s: 5, now: 0});
    showWorkers();
    const lines = [...document.querySelectorAll("#workers tbody tr .level")].filter(l => !l.hidden);
    return lines.map(line => `${line.innerText} ${line.querySelector("i").style.width}`);
  };
  const columns = ["role", "state", "kv_used_percent", "host", "tiers"];
  return [seen(columns), seen(columns.slice(0, 4))];
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Serves the page over 40 simulated workers. Yields its URL and its process."""
    port = free_port()
    folder = tmp_path_factory.mktemp("page")
    command = [sys.executable, "-m", "tests.harness.page_server", "--workers", "40"]
    process = subprocess.Popen([*command, "--port", str(port), "--folder", str(folder)])
    found = f"http://127.0.0.1:{port}/"
    give_up_at = time.monotonic() + DEADLINE_S
    try:
        while True:
            try:
                httpx.get(found)
                break
            except httpx.TransportError:
                assert time.monotonic() < give_up_at
                time.sleep(0.1)
        yield found, process.pid
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url(server: tuple[str, int]) -> str:
    return server[0]


@pytest.fixture
def page(url: str) -> Iterator[Any]:
    """Opens the page; a message in the console or an error in a script fails the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    said: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.goto(url)
        opened.wait_for_selector("#workers tbody tr")
        yield opened
        browser.close()
    assert [text for text in said if "the server responded with a status" not in text] == []


def test_it_shows_the_workers_and_finds_one(page: Any) -> None:
    assert "of 40" in page.inner_text("#workers-shown") or "of 39" in page.inner_text(
        "#workers-shown"
    )
    page.wait_for_selector("#headline.good")  # a worker is lost for a second now and then
    assert "workers that are ready" in page.inner_text("#headline")
    page.fill("#worker-filter", "decode-7")
    page.wait_for_selector("#workers tbody tr:only-child")
    assert page.inner_text("#workers tbody tr td") == "decode-7"
    page.wait_for_selector("#charts canvas")
    page.wait_for_selector("#requests tbody tr")
    assert "/v1/chat/completions" in page.inner_text("#curl")


def test_each_worker_is_drawn_though_no_pass_ends(page: Any) -> None:
    assert page.evaluate(DRAWN) == 1001  # the router, too


def test_a_worker_that_is_ready_and_in_trouble_is_not_green(page: Any) -> None:
    assert page.evaluate(COLORS) == ["#1769c2", "#176b3a", "#b3261e"]  # the router's is the first


def test_the_autoscalers_mode_target_and_reason_are_under_the_pools(page: Any) -> None:
    assert page.is_hidden("#autoscale"), "it is off"
    told = "Autoscaler (dry-run): decode 1 -> 3 for its queue: wanted 3 of 1..8"
    assert page.evaluate(AUTOSCALE) == told


def test_a_row_has_a_bar_for_the_pool_and_for_each_tier(page: Any) -> None:
    assert page.evaluate(LEVELS) == [
        ["50% in use 50%", "host 25% of 1,000 25%", "store 1,234 known 2%"],
        ["50% in use 50%"],
    ]


def test_the_chart_of_tiers_says_what_each_holds(page: Any) -> None:
    chart = "#charts [aria-label^='KV by tier'][aria-label*='latest']:not([aria-label*='none'])"
    told = page.wait_for_selector(chart).get_attribute("aria-label")
    parts = ("pool in use", "pool cached", "host", "disk", "store known")
    assert re.search(", ".join(rf"{part} \d+%" for part in parts), told)


def test_a_drain_is_asked_about_and_its_refusal_is_told_with_the_keyboard_alone(page: Any) -> None:
    page.focus("button[data-key='drain decode-3']")
    page.keyboard.press("Enter")
    page.wait_for_selector("#sure[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#sure:not([open])", state="attached")
    assert page.inner_text("#told") == ""
    page.keyboard.press("Enter")  # the focus is back on the button
    page.wait_for_selector("#sure[open]")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#told.bad")
    assert page.inner_text("#told").startswith("Refused")


@pytest.mark.parametrize("hangs_s", [5, 20])
def test_a_router_that_hangs_is_told_and_is_heard_again(
    page: Any, server: tuple[str, int], hangs_s: int
) -> None:
    """The page waits on for the same stream for some time, and then it opens another one."""
    _, pid = server
    os.kill(pid, signal.SIGSTOP)
    try:
        ends_at = time.monotonic() + hangs_s
        page.wait_for_selector("#headline.bad")
        time.sleep(max(0.0, ends_at - time.monotonic()))
        expected = "This page is not up to date: the router sends nothing."
        assert page.inner_text("#headline") == expected
        assert page.title() == "! Tandem: not up to date"
    finally:
        os.kill(pid, signal.SIGCONT)
    page.wait_for_selector("#headline.good")
    assert "workers that are ready" in page.inner_text("#headline")
    assert "not up to date" not in page.title()


def test_a_page_without_a_clipboard_selects_the_command(page: Any) -> None:
    """Browsers have none for plain HTTP of another machine."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.click("#copy")
    assert page.inner_text("#copy") == "Selected"
    assert page.evaluate("getSelection().toString()").startswith("curl -N")


def test_axe_finds_nothing_serious(page: Any) -> None:
    axe = os.environ.get("TANDEM_AXE", "")
    if not axe:
        pytest.skip("TANDEM_AXE names no axe.min.js")
    page.evaluate(Path(axe).read_text())
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("axe.run()")
        serious = [v["id"] for v in found["violations"] if v["impact"] in ("serious", "critical")]
        assert serious == [], scheme
        assert len(found["passes"]) > 20
