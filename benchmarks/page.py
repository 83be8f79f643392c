"""Measures the operators' page over simulated workers: the browser's tasks, the router's CPU.

It needs Debian's chromium and playwright. The server is a process with the admin listener of a
router and nothing else, and its CPU time includes the simulation of the workers. Runs take turns
with the page open and without it; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_OBSERVE = """
window.longTasks = [];
new PerformanceObserver(list => {
  for (const entry of list.getEntries()) window.longTasks.push(entry.duration);
}).observe({type: "longtask", buffered: true});
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(browser: Any, url: str, pid: int, seconds: float) -> tuple[float, list[float]]:
    """Returns the share of a core that the server took with the page open, and the page's tasks of
    more than 50 ms, in ms."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.add_init_script(_OBSERVE)
    page.goto(url)
    page.wait_for_selector("#workers tbody tr")
    before, began = cpu_s(pid), time.monotonic()
    page.wait_for_timeout(seconds * 1000)
    share = (cpu_s(pid) - before) / (time.monotonic() - began)
    tasks = page.evaluate("window.longTasks")
    page.context.close()
    return share, tasks


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8093)
    options = parser.parse_args()
    command = [sys.executable, "-m", "tests.harness.page_server"]
    command += ["--workers", str(options.workers), "--port", str(options.port)]
    server = subprocess.Popen(command)
    closed, opened, tasks = [], [], []
    try:
        time.sleep(5)
        with sync_playwright() as started:
            browser = started.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
            for _ in range(options.repeats):
                before, began = cpu_s(server.pid), time.monotonic()
                time.sleep(options.seconds)
                closed.append((cpu_s(server.pid) - before) / (time.monotonic() - began))
                url = f"http://127.0.0.1:{options.port}/"
                share, long = measure(browser, url, server.pid, options.seconds)
                opened.append(share)
                tasks.append(max(long, default=0.0))
            browser.close()
    finally:
        server.kill()
        server.wait()
    told = {
        "workers": options.workers,
        "cpu_percent_closed": round(100 * statistics.median(closed), 2),
        "cpu_percent_open": round(100 * statistics.median(opened), 2),
        "longest_task_ms": [round(task) for task in tasks],
        "load": os.getloadavg()[0],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
