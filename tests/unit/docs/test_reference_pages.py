"""The generated pages are those of the code and of the results of benchmarks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import tandem
from docs.reference import apis, figures
from tests.harness.documents import ROOT, pages, tokens


def test_the_pages_of_the_apis_are_those_of_the_code() -> None:
    for path, text in apis.pages().items():
        assert (ROOT / path).read_text("utf-8") == text, f"{path} is old: run make reference"


def test_each_route_of_the_public_api_says_what_it_does() -> None:
    page = (ROOT / "docs" / "reference" / "http.md").read_text()
    public = page[: page.index("## Bodies")]
    routes = re.findall(r"^\| `(\w+ /\S*)` \|.*\|(.*)\|$", public, re.MULTILINE)
    assert len(routes) > 30
    assert not [route for route, description in routes if not description.strip()]


def test_each_call_that_a_page_names_is_in_the_reference() -> None:
    """Pages name a call such as `GET /v1/files/ID`."""
    reference = (ROOT / "docs" / "reference" / "http.md").read_text()
    routes = {
        re.sub(r"\{\w+\}", "ID", r) for r in re.findall(r"^\| `(\w+ /\S*)` ", reference, re.M)
    }
    named = {
        re.sub(r"/(?:[A-Z]+|\{\w+\}|decode-0)(?=/|$)", "/ID", token.content.partition("?")[0])
        for page in pages()
        for token in tokens(page)
        if token.type == "code_inline" and re.match(r"(?:GET|POST|DELETE) /", token.content)
    }
    undocumented = {"POST /ping"}  # the same as GET
    assert len(named) > 40
    assert not named - routes - undocumented


def test_each_name_of_the_python_api_has_a_section() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(tandem.__all__)


def test_the_tables_of_figures_are_those_of_the_results() -> None:
    for path, text in figures.pages().items():
        assert (ROOT / path).read_text("utf-8") == text, f"{path} is old: run make reference"


def test_each_table_of_figures_is_on_one_page() -> None:
    assert sorted(figures.marked()) == sorted(figures.TABLES)


def test_another_result_changes_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = json.loads((figures.RESULTS / "served.json").read_text())
    served["rows"][0]["medians"]["tandem"]["ttft_ms"] = 4321.0
    (tmp_path / "served.json").write_text(json.dumps(served))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures._results.cache_clear()
    try:
        page = "<!-- figures: served -->\n\n| old |\n\n<!-- end -->\n"
        assert "| 4,321 ms |" in figures._with_tables(page)
    finally:
        figures._results.cache_clear()
