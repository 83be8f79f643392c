"""The documentation site builds strictly, needs no network, and shows what the pages have."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.harness.documents import ROOT, pages, tokens

# Pages outside of docs/ that the site has under other names (docs/reference/site.py).
ADDED = {
    "README.md": "index",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "services/README.md": "one_request",
}
BUILT = [p for p in pages() if p.is_relative_to(ROOT / "docs") or str(p.relative_to(ROOT)) in ADDED]


class Elements(HTMLParser):
    """Counts the elements of a page's article, and collects what the page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.loaded: list[str] = []
        self._is_article = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe") and (source := attributes.get("src")):
            self.loaded.append(source)
        if tag == "link" and attributes.get("rel") == "stylesheet":
            self.loaded.append(attributes.get("href") or "")
        self._is_article |= tag == "article"
        if self._is_article:
            self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        self._is_article &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def built(site: Path, page: Path) -> Elements:
    path = str(page.relative_to(ROOT))
    name = ADDED.get(path) or path.removeprefix("docs/").removesuffix(".md")
    found = Elements()
    found.feed((site / f"{name}.html").read_text())
    return found


def test_each_page_has_the_lists_tables_and_blocks_of_its_source(site: Path) -> None:
    """Python-Markdown, which builds the site, reads some lists otherwise than CommonMark."""
    wrong = {}
    for page in BUILT:
        source = [token.type for token in tokens(page)]
        counts = built(site, page).counts
        expected = {
            "li": source.count("list_item_open"),
            "table": source.count("table_open"),
            "tr": source.count("tr_open"),
            "pre": source.count("fence"),
        }
        found = {tag: counts.get(tag, 0) for tag in expected}
        if found != expected:
            wrong[str(page.relative_to(ROOT))] = (expected, found)
    assert not wrong


def test_nothing_is_loaded_from_another_site(site: Path) -> None:
    loaded = {source for page in BUILT for source in built(site, page).loaded}
    assert loaded
    assert not {source for source in loaded if re.match(r"(https?:)?//", source)}
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style.read_text()), style.name


def test_the_search_finds_options_metrics_and_calls(site: Path) -> None:
    text = (site / "search" / "search_index.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    found = {entry["location"] for entry in index["docs"]}
    for place in (
        "reference/options.html#tandem-up",
        "reference/grpc.html#generaterequest",
        "reference/http.html#chatbody",
        "reference/python.html#llmgenerate",
        "troubleshooting.html#the-first-start",
    ):
        assert place in found


def test_the_readme_is_short() -> None:
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text())
    assert len(text.split()) < 600


def test_the_comparison_is_dated_and_names_a_source_for_each_statement() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text()
    assert re.search(r"As of \d+ \w+ 20\d\d", text)
    for row in re.findall(r"^\| .* \|$", text, re.MULTILINE):
        assert row.rsplit("|", 2)[1].strip(), row


def test_the_configuration_uses_the_fonts_of_the_reader() -> None:
    class Loader(yaml.SafeLoader):
        """Reads the file without the objects that its tags name."""

    Loader.add_multi_constructor("tag:", lambda loader, suffix, node: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    assert config["theme"]["font"] is False
    assert config["strict"] is True
