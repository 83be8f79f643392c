"""The operators' page in a real browser, over simulated workers. A test of the page over a real
cluster is in tests/e2e/test_page.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.harness.browser import axe_findings, opened
from tests.harness.cluster import free_port

pytestmark = pytest.mark.service

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
  const {color} = await import("./page/dom.js");
  const {take} = await import("./page/feed.js"), {showPicture} = await import("./page/picture.js");
  const drawn = [], canvas = CanvasRenderingContext2D.prototype, stroke = canvas.strokeRect;
  canvas.strokeRect = function (x, y) { drawn.push({x, y, style: this.strokeStyle}); };
  const row = note => ["decode", "ready", 50, note];
  const workers = {"decode-0": row(""), "decode-1": row("its disk is full")};
  const worker_columns = ["role", "state", "kv_used_percent", "note"];
  take("full", {workers, worker_columns, sample_columns: [], step_s: 5, now: 0});
  for (let rest = showPicture(); rest; rest = rest());
  canvas.strokeRect = stroke;
  const named = new Map(["router", "good", "bad"].map(name => [color(name), name]));
  return drawn.sort((a, b) => a.x - b.x || a.y - b.y).map(each => named.get(each.style));
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
    const lines = [...document.querySelectorAll("#workers li .level")].filter(l => !l.hidden);
    return lines.map(line => `${line.innerText} ${line.querySelector("i").style.width}`);
  };
  const columns = ["role", "state", "kv_used_percent", "host", "tiers"];
  return [seen(columns), seen(columns.slice(0, 4))];
}"""

# Shows a worker with two ranks, one with one rank, and one of an older router's feed; returns the
# line below the name of each.
RANKS = """async () => {
  const {take} = await import("./page/feed.js"), {showWorkers} = await import("./page/workers.js");
  const seen = (ranks, columns) => {
    const workers = {"decode-0": ["decode", "prefill", "ready", ranks].slice(0, columns.length)};
    take("full", {workers, worker_columns: columns, sample_columns: [], step_s: 5, now: 0});
    showWorkers();
    return document.querySelector("#workers li .name .muted").innerText;
  };
  const columns = ["role", "pool", "state", "ranks"];
  return [seen(2, columns), seen(1, columns), seen(2, columns.slice(0, 3))];
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
    with opened(url) as found:
        found.wait_for_selector("#workers li strong")
        yield found


def test_it_shows_the_workers_and_finds_one(page: Any) -> None:
    assert re.fullmatch("1 to 20 of (39|40)", page.inner_text("#workers-shown"))
    page.wait_for_selector("#headline.good")  # a worker is lost for a second now and then
    assert "workers are ready" in page.inner_text("#headline")
    page.fill("#worker-filter", "decode-7")
    page.wait_for_selector("#workers li:only-child")
    assert page.inner_text("#workers li strong") == "decode-7"
    assert page.is_hidden("#workers-pager"), "there is one page"
    page.fill("#worker-filter", "nowhere")
    page.wait_for_selector("#workers li", state="detached")
    assert page.inner_text("#workers-shown") == "no worker fits"


def test_health_is_first_then_the_cluster_then_requests(page: Any) -> None:
    page.wait_for_selector("#requests li .bar")
    titles = [title.inner_text() for title in page.query_selector_all("main h2")]
    expected = [
        "Now, and since the start (at most 15 minutes)",
        "In words",
        "The cluster",
        "Requests",
        "Workers",
    ]
    assert titles[:5] == expected
    tiles = [title.inner_text() for title in page.query_selector_all("#health figcaption")]
    assert tiles == [
        *("Tokens/s", "Requests", "Time to first token", "Time between tokens"),
        *("Failures a second", "KV cache"),
    ]
    page.wait_for_selector("#health canvas")


def test_on_a_phone_the_answers_are_first(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 1000})
    tops = [page.query_selector(f"#{name}").bounding_box()["y"] for name in ("words", "health")]
    assert tops == sorted(tops)


# Shows a cluster of which one decode worker loads; returns the banner's class, the decode pool's
# sizes, the numbers of the tile, and whether its chart says that there is no data.
DEGRADED = """async () => {
  const {state} = await import("./page/feed.js"), {showPools} = await import("./page/workers.js");
  const {showFigures, showCharts} = await import("./page/charts.js");
  const others = {loading: 1};
  state.head.pools.decode = {wanted: 3, running: 3, ready: 2, others};
  state.samples = [];
  state.figures = {ttft_p50_ms: 3300, ttft_max_ms: 11800};
  showPools(); showFigures(); showCharts();
  const tile = document.querySelector("#health figure:nth-child(3)");
  const texts = path => [...tile.querySelectorAll(path)].map(each => each.innerText);
  const pool = document.querySelector("[data-pool=decode]").innerText.replace(/\\s+/g, " ").trim();
  const numbers = texts("b"); // before the next event of the feed replaces them
  await new Promise(resolve => setTimeout(resolve, 500));
  return [pool, numbers, texts(".none")];
}"""


def test_pools_and_tiles_tell_the_snapshots_truth(page: Any) -> None:
    page.route("**/v1/cluster/live", lambda route: route.abort())
    pool, numbers, notes = page.evaluate(DEGRADED)
    assert pool.endswith("3 of 3 running, 2 ready, 1 loading")
    assert numbers == ["3.3 s", "11.8 s"], "the answers in words have the same numbers"
    assert notes == ["in the last minute", "no data yet"]


# Shows a decode worker with three kinds of requests, a prefill worker, and a request of each phase;
# returns the words of the boxes, of the tile and of the requests.
PHASES = """async () => {
  const {state, take} = await import("./page/feed.js");
  const {workInPicture} = await import("./page/workers.js");
  const {showRequests} = await import("./page/requests.js");
  const {showFigures} = await import("./page/charts.js");
  const worker_columns = [
    "role", "state", "decoding", "in_prefill", "queued", "leases", "queued_tokens"];
  const workers = {
    "decode-0": ["decode", "ready", 2, 1026, 1, 0, 0],
    "prefill-0": ["prefill", "ready", 0, 0, 0, 5, 9000],
    "prefill-1": ["prefill", "ready", 0, 0, 0, 1, 0],
    "decode-1": ["decode", "ready", 0, 0, 0, 0, 0],
  };
  const figures = {decoding: 2, in_prefill: 1026, queued: 1};
  const same = {
    kind: "chat", outcome: "running", first_decode_worker: "", stages_ms: {}, prompt_tokens: 9,
    completion_tokens: 0, e2e_ms: null, why: "",
  };
  const requests = [
    {...same, phase: "router", decode_worker: "", ttft_ms: null},
    {...same, phase: "queued", decode_worker: "", ttft_ms: null},
    {...same, phase: "prefill", decode_worker: "decode-0", ttft_ms: null},
    {...same, phase: "moved", decode_worker: "decode-0", ttft_ms: 50},
    {...same, phase: "decoding", decode_worker: "decode-0", ttft_ms: 50},
  ].map((each, i) => ({...each, id: each.phase, created: 5 - i}));
  const full = {workers, worker_columns, requests, figures, samples: []};
  take("full", {...full, sample_columns: [], step_s: 5, now: 6});
  showRequests(); showFigures();
  const texts = path => [...document.querySelectorAll(path)].map(each => each.innerText);
  return [
    [...state.workers.values()].map(workInPicture),
    texts("#health figure:nth-child(2) .values > span"),
    texts("#requests li > div:first-child > div:nth-child(2)"),
  ];
}"""


def test_an_open_request_has_the_words_of_the_tile(page: Any) -> None:
    page.route("**/v1/cluster/live", lambda route: route.abort())
    boxes, tile, requests = page.evaluate(PHASES)
    assert boxes == [
        *("2 decoding, 1,026 in prefill, 1 queued", "9,000 prompt tokens to compute"),
        *("KV of 1 held for a pull", "idle"),
    ]
    assert [" ".join(each.split()) for each in tile] == [
        "2 decoding",
        "1026 in prefill",
        "1 queued",
    ]
    assert requests == [
        *("in the router", "queued in the router", "in prefill or queued at decode-0"),
        *("moved, in prefill or queued at decode-0", "decoding at decode-0"),
    ]


# Shows 15 minutes of samples with one slow first token, and a slower one since the last sample;
# returns the times of the chart's last two points, its largest values, and the end of its lines.
POINTS = """async () => {
  const {take} = await import("./page/feed.js"), {columns} = await import("./page/charts.js");
  const names = ["ttft_p50_ms", "ttft_max_ms"];
  const samples = Array.from({length: 180}, (_, n) => [1000 + 5 * n, 300, n === 90 ? 11800 : 400]);
  const step = {ttft_p50_ms: 500, ttft_max_ms: 12000};
  const full = {workers: {}, worker_columns: [], step_s: 5, now: 1898, samples, step};
  take("full", {...full, sample_columns: ["at", ...names]});
  const [at, medians, slowest] = columns({lines: names.map(name => [name]), isHealth: true});
  return [at.slice(-2), Math.max(...slowest.slice(0, -1)), medians.at(-1), slowest.at(-1)];
}"""


def test_no_value_of_a_tile_is_missing_in_its_chart(page: Any) -> None:
    page.route("**/v1/cluster/live", lambda route: route.abort())
    assert page.evaluate(POINTS) == [[1895, 1898], 11800, 500, 12000]


def test_a_banner_is_amber_while_requests_are_served(page: Any) -> None:
    page.wait_for_selector("#headline.good")
    page.wait_for_selector("#headline.wait", timeout=60_000)  # one worker is lost now and then
    assert "is lost" in page.inner_text("#headline")
    assert page.inner_text("#headline").startswith("Degraded: ")


def test_the_page_answers_an_operators_questions(page: Any) -> None:
    page.wait_for_function(
        "document.querySelector('[data-answer=minute]').innerText.includes('ended')"
    )
    answers = {
        each.get_attribute("data-answer"): each.inner_text()
        for each in page.query_selector_all("[data-answer]")
    }
    assert re.match(r"Nothing stands out. First tokens came after \d+ ms", answers["slow"])
    assert "is prefill (computing prompts, and waiting behind other prompts)" in answers["slow"]
    assert re.match(r"\d+% is in use by open requests, \d+% holds prefixes", answers["kv"])
    counts = r"[\d,]+ requests? arrived, [\d,]+ got the first token, and [\d,]+ ended; none failed"
    assert re.search(counts, answers["minute"])
    assert "not known yet: no decode worker has measured" in answers["more_decode"]


def test_a_bar_has_its_own_scale_and_says_what_took_longest(page: Any) -> None:
    item = page.wait_for_selector("#requests li:has(.bar)")
    parts = item.query_selector_all("i")
    widths = [part.evaluate("part => parseFloat(part.style.width)") for part in parts]
    assert abs(sum(widths) - 100) < 0.1
    total = item.query_selector(".scale span")
    assert re.fullmatch(r"\d+ ms", total.text_content()), "it is at the bar's end"
    longest = r"Longest: \d+ ms in prefill on prefill-\d+, which computed 64 of 128 prompt tokens"
    assert re.search(longest, item.inner_text())
    assert "The load decided: this request is simulated." in item.inner_text()


def test_each_color_of_the_bars_is_in_the_legend(page: Any) -> None:
    page.wait_for_selector("#requests li .bar i")
    colors = """place => [...document.querySelectorAll(place)].map(
        each => getComputedStyle(each).backgroundColor)"""
    legend = page.evaluate(colors, "#stage-legend i")
    assert len(set(legend)) == len(legend)
    assert set(page.evaluate(colors, "#requests .bar i")) <= set(legend)


def test_more_requests_are_shown_on_demand(page: Any) -> None:
    page.wait_for_selector("#requests-more:visible")
    assert len(page.query_selector_all("#requests li")) == 8
    page.click("#requests-more")
    assert len(page.query_selector_all("#requests li")) > 8
    assert page.inner_text("#requests-more") == "Show fewer"


# Returns the pairs of visible texts that overlap, and the texts that are cut off. The box of the
# curl command scrolls, so its text is left out.
OVERLAPS = """() => {
  for (const each of document.querySelectorAll("section")) each.style.contentVisibility = "visible";
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange(), found = [];
  while (walker.nextNode()) {
    const {currentNode: node, currentNode: {parentElement: parent}} = walker;
    const text = node.data.trim().slice(0, 40);
    if (!text || !parent.checkVisibility() || parent.closest(".skip, pre")) continue;
    range.selectNodeContents(node);
    for (const {left, right, top, bottom} of range.getClientRects()) {
      texts.push({text, left: left + 1, right: right - 1, top: top + 3, bottom: bottom - 3});
      if (right > innerWidth + 1 || left < -1) found.push(`cut off: ${text}`);
    }
  }
  const meet = (a, b) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  texts.forEach((a, i) => texts.slice(i + 1).forEach(b => {
    if (meet(a, b)) found.push(`${a.text} / ${b.text}`);
  }));
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");
  return found;
}"""


def test_nothing_overlaps_at_any_width(page: Any) -> None:
    page.wait_for_selector("#requests li .bar")
    for width in (320, 390, 768, 1440, 3840):
        page.set_viewport_size({"width": width, "height": 1200})
        page.wait_for_selector("#health figure:last-child canvas")
        assert (found := page.evaluate(OVERLAPS)) == [], (width, found)
    page.click("#open-chat")
    page.click("summary")
    for width in (1200, 1440, 1920, 3840):  # the chat is beside the page
        page.set_viewport_size({"width": width, "height": 1200})
        page.wait_for_selector("#health figure:last-child canvas")
        assert (found := page.evaluate(OVERLAPS)) == [], (width, found)


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_axe_finds_nothing(page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 1200})
    page.emulate_media(color_scheme=scheme)
    page.wait_for_selector("#requests li .bar")
    page.wait_for_selector("#health canvas")
    assert axe_findings(page) == []
    page.click("#open-chat")
    page.click("summary")
    assert axe_findings(page) == []


def test_each_worker_is_drawn_though_no_pass_ends(page: Any) -> None:
    assert page.evaluate(DRAWN) == 1001  # the router, too


def test_a_worker_that_is_ready_and_in_trouble_is_not_green(page: Any) -> None:
    assert page.evaluate(COLORS) == ["good", "good", "bad"]


def test_the_autoscalers_mode_target_and_reason_are_under_the_pools(page: Any) -> None:
    assert page.is_hidden("#autoscale"), "it is off"
    told = "Autoscaler (dry-run): decode 1 -> 3 for its queue: wanted 3 of 1..8"
    assert page.evaluate(AUTOSCALE) == told


def test_a_row_has_a_bar_for_the_pool_and_for_each_tier(page: Any) -> None:
    assert page.evaluate(LEVELS) == [
        ["50% in use 50%", "host 25% of 1,000 25%", "store 1,234 known 2%"],
        ["50% in use 50%"],
    ]


def test_a_worker_of_several_ranks_says_how_many(page: Any) -> None:
    one = "decode (of prefill)"
    assert page.evaluate(RANKS) == [f"{one}, 2 ranks", one, one]


def test_the_chart_of_tiers_says_what_each_holds(page: Any) -> None:
    chart = "#charts [aria-label^='KV by tier'][aria-label*='latest']:not([aria-label*='none'])"
    told = page.wait_for_selector(chart).get_attribute("aria-label")
    parts = ("pool in use", "pool cached", "host", "disk", "store known")
    assert all(re.search(rf"\b{part} \d+%", told) for part in parts), told


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
    assert "workers are ready" in page.inner_text("#headline")
    assert "not up to date" not in page.title()


def test_a_page_without_a_clipboard_selects_the_command(page: Any) -> None:
    """Browsers have none for plain HTTP of another machine."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.click("#open-chat")
    page.click("summary")
    page.click("#copy")
    assert page.inner_text("#copy") == "Selected"
    assert page.evaluate("getSelection().toString()").startswith("curl -N")


# Shows the curl command of a router that needs a key, or none; returns the command.
CURL = """async needs_key => {
  const {state} = await import("./page/feed.js"), {showCurl} = await import("./page/chat.js");
  state.head.public.needs_key = needs_key;
  showCurl();
  return document.getElementById("curl").textContent;
}"""


def test_the_command_has_a_key_only_where_one_is_needed(page: Any) -> None:
    assert "TANDEM_API_KEY" not in page.text_content("#curl")
    assert "/v1/chat/completions" in page.text_content("#curl")
    assert '"Authorization: Bearer $TANDEM_API_KEY"' in page.evaluate(CURL, True)
    assert "Authorization" not in page.evaluate(CURL, False)


# Shows a pool twice, and in between types a size if `typed` is one; returns the sizes shown.
POOL_SIZES = """async typed => {
  const {state} = await import("./page/feed.js"), {showPools} = await import("./page/workers.js");
  const sizes = [2, 3].map(wanted => {
    const name = `of${typed}`, pool = {wanted, running: wanted, ready: wanted};
    state.head.pools = {...state.head.pools, [name]: pool};
    showPools();
    const size = document.querySelector(`[data-pool="${name}"] input`), shown = size.value;
    if (typed) { size.value = typed; size.dispatchEvent(new Event("input")); }
    return shown;
  });
  return sizes;
}"""


def test_a_pools_size_follows_the_cluster_until_one_is_typed(page: Any) -> None:
    assert page.evaluate(POOL_SIZES, 0) == ["2", "3"]
    assert page.evaluate(POOL_SIZES, 7) == ["2", "7"]


def test_a_chat_shows_reasoning_the_answer_and_how_it_ended(page: Any) -> None:
    """The reply is written here, because no model of the tests reasons."""
    deltas = [{"reasoning_content": "Hm."}, {"content": "An "}, {"content": "apple."}, {}]
    chunks = [
        {"choices": [{"delta": delta, "finish_reason": None if delta else "stop"}]}
        for delta in deltas
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    sent: list[dict[str, Any]] = []

    def reply(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/cluster/chat", reply)
    page.click("#open-chat")
    page.fill("#message", "What")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("fell?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#answers .ending")
    lines = [
        (line.get_attribute("class"), line.inner_text())
        for line in page.query_selector_all("#answers p")
    ]
    assert lines[:2] == [("speaker", "You"), ("mine", "What\nfell?")]
    assert lines[2:5] == [("speaker", "tiny"), ("thought", "Hm."), (None, "An apple.")]
    assert lines[5][1].startswith("The answer is complete (finish_reason: stop). First token after")
    assert page.input_value("#message") == ""
    page.keyboard.type("Why?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#answers .ending >> nth=1")
    assert [each["content"] for each in sent[1]["messages"]] == ["What\nfell?", "An apple.", "Why?"]
    page.click("#anew")
    assert page.inner_text("#answers") == ""
