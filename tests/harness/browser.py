"""Opens pages in Debian's chromium, with playwright.

Without chromium, the tests are skipped. In CI (`CI=true`) they fail instead, unless `.ci/run` has
set TANDEM_NO_BROWSER to the reason why it could not install chromium.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
_OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage"]  # root has no sandbox; /dev/shm may be small
_AXE = "axe_playwright_python"  # the package that brings axe.min.js


@contextmanager
def opened(url: str, *, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """Opens a page. A message in its console or an error in its scripts fails the test."""
    if CHROMIUM is None:
        why = os.environ.get("TANDEM_NO_BROWSER", "")
        if os.environ.get("CI") == "true" and not why:
            pytest.fail("chromium is not installed: `.ci/run` installs it")
        pytest.skip(f"chromium is not installed{why and f': {why}'}")
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=_OPTIONS)
        page = browser.new_context(viewport={"width": width, "height": height}).new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        yield page
        browser.close()
    assert [text for text in said if "the server responded with a status" not in text] == []


def axe_findings(page: Any) -> list[str]:
    """Returns what axe-core finds on the page as it is now: the rule and the first element."""
    page.evaluate((files(_AXE) / "axe.min.js").read_text())
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 20
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found["violations"]]
