"""Measures the operators' page over simulated workers: the browser's tasks, the router's CPU.

    python -m tests.service.router.page_speed [--workers 1000] [--repeats 3] [--out FILE]

It needs Debian's chromium and playwright. The server is a process with the admin listener of a
router and nothing else, and its CPU time includes the simulation of the workers. Runs take turns
with the page open and without it; the figures are medians. `--out` gets each task of more than
50 ms with its time, and the scripts, styles and layouts of frames that took as long.
`longest_task_cpu_ms` is the CPU time of the longest task, which other work on the machine does not
stretch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tandem_bench.framework import options, run_main, write

_TRACED = ["disabled-by-default-devtools.timeline", "devtools.timeline"]
_OBSERVE = """
window.longTasks = [];
window.longFrames = [];
new PerformanceObserver(list => {
  for (const {startTime, duration, name} of list.getEntries()) {
    window.longTasks.push({at_ms: startTime, took_ms: duration, name});
  }
}).observe({type: "longtask", buffered: true});
new PerformanceObserver(list => {
  for (const frame of list.getEntries()) window.longFrames.push({
    at_ms: frame.startTime, took_ms: frame.duration,
    style_and_layout_ms: frame.startTime + frame.duration - frame.styleAndLayoutStart,
    scripts: frame.scripts.map(script => ({
      at_ms: script.startTime, took_ms: script.duration, invoker: script.invoker,
      function: script.sourceFunctionName, source: script.sourceURL.split("/").at(-1),
      forced_layout_ms: script.forcedStyleAndLayoutDuration,
    })),
  });
}).observe({type: "long-animation-frame", buffered: true});
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(browser: Any, url: str, pid: int, seconds: float) -> tuple[float, dict[str, Any]]:
    """Returns the share of a core that the server took with the page open, and the page's tasks and
    frames of more than 50 ms."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.add_init_script(_OBSERVE)
    browser.start_tracing(page=page, categories=_TRACED)
    page.goto(url)
    page.wait_for_selector("#workers li")
    before = cpu_s(pid)
    began = time.monotonic()
    page.wait_for_timeout(seconds * 1000)
    share = (cpu_s(pid) - before) / (time.monotonic() - began)
    long = page.evaluate("({tasks: window.longTasks, frames: window.longFrames})")
    long["cpu_ms"] = sorted(_tasks_cpu_ms(json.loads(browser.stop_tracing())), reverse=True)[:10]
    page.context.close()
    return share, _rounded(long)


def _tasks_cpu_ms(trace: dict[str, Any]) -> list[float]:
    """Returns the CPU time of each task of the page's main thread. A task that waits for a core
    looks longer than that."""
    events = trace["traceEvents"]
    mains = {
        (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and e["args"].get("name") == "CrRendererMain"
    }
    return [
        e["tdur"] / 1000
        for e in events
        if e["name"] == "RunTask" and "tdur" in e and (e["pid"], e["tid"]) in mains
    ]


def _rounded(told: Any) -> Any:
    """Returns the same with all numbers to a tenth."""
    if isinstance(told, dict):
        return {name: _rounded(value) for name, value in told.items()}
    if isinstance(told, list):
        return [_rounded(value) for value in told]
    return round(told, 1) if isinstance(told, float) else told


@options
class Options:
    workers: int = 1000
    seconds: float = 20
    repeats: int = 3
    port: int = 8093
    out: Path | None = None
    """A JSON file, such as benchmarks/results/page.json."""


def main(options: Options = Options()) -> None:
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "tests.harness.page_server"]
    command += ["--workers", str(options.workers), "--port", str(options.port)]
    server = subprocess.Popen(command)
    closed, opened, runs = [], [], []
    try:
        time.sleep(5)
        with sync_playwright() as started:
            browser = started.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
            for _ in range(options.repeats):
                before = cpu_s(server.pid)
                began = time.monotonic()
                time.sleep(options.seconds)
                closed.append((cpu_s(server.pid) - before) / (time.monotonic() - began))
                url = f"http://127.0.0.1:{options.port}/"
                share, long = measure(browser, url, server.pid, options.seconds)
                opened.append(share)
                runs.append({"load": round(os.getloadavg()[0], 1), **long})
            version = browser.version
            browser.close()
    finally:
        server.kill()
        server.wait()
    told = {
        "workers": options.workers,
        "cpu_percent_closed": round(100 * statistics.median(closed), 2),
        "cpu_percent_open": round(100 * statistics.median(opened), 2),
        "longest_task_ms": [max((t["took_ms"] for t in run["tasks"]), default=0) for run in runs],
        "longest_task_cpu_ms": [max(run["cpu_ms"], default=0) for run in runs],
        "load": os.getloadavg()[0],
    }
    print(json.dumps(told))
    if options.out is not None:
        told |= {"chromium": version, "command": " ".join(sys.argv), "runs": runs}
        write(options.out, told)


if __name__ == "__main__":
    run_main(main)
