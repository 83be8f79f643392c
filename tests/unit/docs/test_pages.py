"""The names in the documents exist: links, images, anchors, modules, options and metrics."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from tests.harness.documents import OUTPUT, PYTHON, ROOT, SHELL, fences, pages, source_has, tokens

PAGES = pages()
TANDEM = ROOT / "services" / "tandem"
WIDTH = 120
FOLDERS = "benchmarks|deploy|docs|helm|kernels|proto|services|tests"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def inline_code(page: Path) -> list[str]:
    return [t.content for t in tokens(page) if t.type == "code_inline"]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    found = tokens(page)
    titles = [b.content for a, b in itertools.pairwise(found) if a.type == "heading_open"]
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_and_image_exists(page: Path) -> None:
    targets = {
        str(token.attrs[key])
        for token in tokens(page)
        for key in ("href", "src")
        if key in token.attrs
    }
    for target in targets:
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_prose_has_120_columns_and_blocks_have_a_language(page: Path) -> None:
    assert {f.language for f in fences(page)} <= {SHELL, PYTHON, OUTPUT}
    lines = page.read_text().splitlines()
    in_blocks = {f.line + n for f in fences(page) for n in range(f.text.count("\n"))}
    wide = [
        number
        for number, line in enumerate(lines, 1)
        if len(line) > WIDTH and not line.startswith("|") and number not in in_blocks
    ]
    assert not wide, f"{name(page)} has wide lines: {wide}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_has_the_marks_of_an_unfinished_merge(page: Path) -> None:
    assert not re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_path_in_the_text_exists(page: Path) -> None:
    paths = [
        code for code in inline_code(page) if re.fullmatch(rf"({FOLDERS})/[a-z0-9_./-]+", code)
    ]
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_module_and_package_of_the_newcomers_page_exists() -> None:
    page = ROOT / "services" / "README.md"
    named = [code for code in inline_code(page) if re.fullmatch(r"[\w./]+(\.py|/)", code)]
    assert len(named) > 60
    missing = [n for n in named if not ((ROOT / n).exists() or any(TANDEM.glob(f"**/{n}")))]
    assert not missing


def test_every_package_is_on_the_newcomers_page() -> None:
    named = inline_code(ROOT / "services" / "README.md")
    packages = [p for p in (*TANDEM.iterdir(), *TANDEM.glob("*/*")) if (p / "__init__.py").exists()]
    folders = {str(p.relative_to(TANDEM)) for p in packages}
    assert not {f for f in folders if f"{f}/" not in named}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_are_in_the_files_that_the_text_gives_for_them(page: Path) -> None:
    """A text such as "`_RANGES` of `check_spec.py`" gives a file for a name."""
    text = " ".join(page.read_text().split())
    pattern = r"((?:`\w+`(?:, | or | and ))*`\w+`) (?:of|in) `([\w/]+\.py)`"
    for names, path in re.findall(pattern, text):
        files = [file for file in (ROOT / path, *TANDEM.glob(f"**/{path}")) if file.exists()]
        assert files, path
        sources = " ".join(file.read_text() for file in files)
        assert not [n for n in re.findall(r"`(\w+)`", names) if not re.search(rf"\b{n}\b", sources)]


def is_exported(metric: str) -> bool:
    """Returns whether the sources have the name, whole or as a family's beginning and its last
    part."""
    if source_has(f"tandem_{metric}") or source_has(metric):
        return True
    cuts = [cut.start() for cut in re.finditer("_", metric)]
    return any(
        source_has(f'f"tandem_{metric[:cut]}_{{name}}"') and source_has(metric[cut + 1 :])
        for cut in cuts
    )


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=name)
def test_every_metric_exists(page: Path) -> None:
    metrics = set(re.findall(r"tandem_[a-z0-9_]+", " ".join(inline_code(page))))
    stems = {m.removeprefix("tandem_").removesuffix("_total") for m in metrics}
    assert not [stem for stem in stems if not is_exported(stem)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_option_exists(page: Path) -> None:
    options = {
        o for code in inline_code(page) for o in re.findall(r"(?<![\w-])--[a-z][\w-]+", code)
    }
    # Generated from the settings; tests/unit/common/test_options.py compares the two.
    reference = (ROOT / "docs" / "reference" / "options.md").read_text()
    missing = [
        option
        for option in options
        if f"`{option}`" not in reference
        and not source_has(option)
        and not source_has(option[2:].replace("-", "_"))
    ]
    assert not missing


def test_the_glossary_has_each_term_once() -> None:
    rows = [r for r in (ROOT / "docs" / "glossary.md").read_text().splitlines() if r[:1] == "|"]
    terms = [term for row in rows for term in row.split("|")[1].split(",")]
    plain = [t.strip(" `-") for t in terms]
    named = [t for t in plain if t not in ("", "term", "mode")]
    assert len(named) > 60
    assert sorted(set(named)) == sorted(named)


def test_hooks_before_a_commit_are_local_and_part_of_the_check() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [r["repo"] for r in repositories] == ["local"]
    recipes = (ROOT / "Makefile").read_text()
    for hook in repositories[0]["hooks"]:
        path, program = Path(hook["entry"].split()[0]).parent, Path(hook["entry"].split()[0]).name
        assert str(path) == ".venv/bin"
        assert f"$(BIN)/{program}" in recipes
