"""Docstrings are sentences: they begin with their subject, and end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("services/tandem", "kernels/tandem_kernels", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if "rpc/tandem/v1" not in str(path)
)
# A docstring that opens with one of these goes on where the symbol's name ends.
NO_SUBJECT = re.compile(
    r"(After|Also|And|As|At|Before|By|For|From|How|If|In|Never|None|Not|Of|On|Only|Or|So|Such|Than"
    r"|That|Those|To|Until|What|When|Where|Whether|Which|While|Who|Whom|Whose|Why|With)\b"
)
END = re.compile(r"[.:?!`)\"]$")


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Symbols and the first paragraphs of their docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "name", path.stem), " ".join(text.split("\n\n")[0].split())


def fault(text: str) -> str:
    if NO_SUBJECT.match(text):
        return "has no subject first"
    if not (text[0].isupper() or text[0] in "`\"'/{0123456789"):
        return "begins in lower case"
    return "" if END.search(text) else "does not end"


@pytest.mark.parametrize("text", ["Of all.", "how many", "Counts", "What a worker tells."])
def test_no_sentence_is_found(text: str) -> None:
    assert fault(text)


def test_every_docstring_is_a_sentence() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} {name} {why}: {text[:80]}"
        for path in SOURCES
        for name, text in docstrings(path)
        if (why := fault(text))
    ]
    assert not wrong, "\n".join(wrong)
