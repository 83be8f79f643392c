"""Takes the pictures of the operators' page in docs/images, over a real cluster.

`python -m tests.harness.page_pictures` starts `tandem up` with two prefill and three decode workers
and takes five pictures: without requests, under load, a second after a kill of a decode worker, in
the dark scheme with the chat, and on a phone. It takes about three minutes. It prints the answers
in words that each picture shows, so that a reader can compare them with the picture.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.harness.browser import opened
from tests.harness.cluster import free_port, wait_for

ROOT = Path(__file__).parents[2]
WORDS = ("gravity", "pulls", "every", "mass", "towards", "every", "other", "mass", "and", "light")
PROMPT_WORDS = 1000
LOAD_S = 75.0
# An answer of this many tokens takes a few seconds, so a decode worker always has requests.
TOKENS_MAX = 120


@contextmanager
def launched(model: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Runs a cluster. Yields the URLs of its API and of its page."""
    ports = free_port(), free_port()
    command = [sys.executable, "-m", "tandem.ops.cli", "up", model, "--prefill", "2"]
    command += ["--decode", "3", "--port", str(ports[0]), "--admin-port", str(ports[1])]
    command += ["--grpc-port", str(free_port()), "--admin-grpc-port", str(free_port())]
    path = folder / "up.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def is_ready() -> bool:
        assert process.poll() is None, path.read_text()[-2000:]
        return "Ctrl-C stops" in path.read_text()

    try:
        wait_for(is_ready, deadline_s=180, what="the cluster")
        yield f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def loaded(url: str, interval_s: float) -> Iterator[None]:
    """Sends a request with a long prompt every `interval_s` until the `with` block ends."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def send(number: int) -> None:
        words = (WORDS[(number * 7 + n) % len(WORDS)] for n in range(PROMPT_WORDS))
        text = f"Text {number}: {' '.join(words)}. What is it about?"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS_MAX}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)

    def send_all() -> None:
        number = 0
        while not ended.wait(interval_s):
            threads.append(threading.Thread(target=send, args=(number,)))
            threads[-1].start()
            number += 1

    sending = threading.Thread(target=send_all)
    sending.start()
    try:
        yield
    finally:
        ended.set()
        sending.join()
        for thread in threads:
            thread.join()


def busiest_decode_worker(admin_url: str) -> dict[str, Any]:
    workers = httpx.get(f"{admin_url}/v1/cluster").json()["workers"]
    decode = [worker for worker in workers if worker["role"] == "decode"]
    return max(decode, key=lambda worker: worker["load"]["num_running"])


def take_pictures(url: str, admin_url: str, folder: Path, interval_s: float) -> None:
    with opened(admin_url, width=1440, height=1250) as page:

        def take(name: str, width: int, height: int) -> None:
            page.set_viewport_size({"width": width, "height": height})
            page.evaluate("scrollTo(0, 0)")
            page.wait_for_timeout(1500)  # the charts are drawn anew for the width
            page.screenshot(path=folder / f"page_{name}.png")
            print(f"{name}: {page.inner_text('#headline')}")
            for answer in page.query_selector_all("[data-answer]"):
                print(f"  {answer.get_attribute('data-answer')}: {answer.inner_text()}")
            for item in page.query_selector_all("#requests li")[:3]:
                print("  request: " + " | ".join(item.inner_text().splitlines()))

        page.wait_for_selector("#headline.good")
        page.wait_for_timeout(20_000)
        take("idle", 1440, 1250)
        with loaded(url, interval_s):
            time.sleep(LOAD_S)
            take("load", 1440, 1400)
            take("phone", 390, 1000)
            page.set_viewport_size({"width": 1440, "height": 1250})
            busy = wait_for(
                lambda: (w := busiest_decode_worker(admin_url))["load"]["num_running"] and w,
                deadline_s=30,
                what="a request that decodes",
            )
            os.kill(busy["pid"], signal.SIGKILL)
            page.wait_for_selector("[data-answer=minute]:has-text('was killed')")
            take("kill", 1440, 1250)
        page.wait_for_selector("#headline.good", timeout=120_000)
        page.emulate_media(color_scheme="dark")
        page.click("#open-chat")
        page.fill("#message", "What is gravity?")
        page.keyboard.press("Enter")
        page.wait_for_selector("#answers .ending", timeout=60_000)
        take("dark", 1440, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--interval", type=float, default=1.2, help="seconds between requests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs, launched(options.model, Path(logs)) as urls:
        take_pictures(*urls, options.folder, options.interval)


if __name__ == "__main__":
    main()
