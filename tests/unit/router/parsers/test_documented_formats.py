"""The tables of docs/tools.md: which marks choose which parsers, and how each format looks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.router.parsers.formats import (
    REASONING_TAGS,
    TOOL_FORMATS,
    choose_reasoning,
    choose_tool_format,
)

PAGE = (Path(__file__).parents[4] / "docs/tools.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the table whose first line begins with `heading`."""
    _, _, table = PAGE.partition(f"| {heading} |")
    lines = table.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code(cell: str) -> list[str]:
    """Returns the texts in a cell that are marked as code."""
    return [text.strip().replace("\\|", "|") for _, text in re.findall(r"(`+)(.+?)\1(?!`)", cell)]


@pytest.mark.parametrize("row", rows("models"), ids=lambda row: row[0][:30])
def test_marks_choose_the_parsers(row: list[str]) -> None:
    _, cell, tools, reasoning = row
    marks = code(cell)
    in_tokens = "added tokens" in cell
    template = "{{ tools }}" if in_tokens else "{{ tools }}" + "\n".join(marks)
    tokens = marks if in_tokens else ()
    chosen = (choose_tool_format(template, tokens), choose_reasoning(template, tokens))
    assert chosen == (*code(tools), *code(reasoning))


def test_every_parser_is_in_the_tables() -> None:
    models = rows("models")
    assert {*code(" ".join(row[2] for row in models))} == {*TOOL_FORMATS}
    assert {*code(" ".join(row[3] for row in models))} == {*REASONING_TAGS}


def test_the_calls_are_those_of_the_formats() -> None:
    shown = {code(name)[0]: code(cell) for name, cell in rows("`--tool-parser` | call")}
    assert shown == {
        name: [frame.write([("f", {"a": "b"})]).replace("\n", " ") for frame in tool_format.frames]
        for name, tool_format in TOOL_FORMATS.items()
    }


def test_the_tags_are_those_of_the_formats() -> None:
    shown = {
        code(name)[0]: [*code(tags), *code(around)]
        for name, tags, around in rows("`--reasoning-parser` | tags around reasoning")
    }
    assert shown == {
        name: [mark.strip() for mark in tags.marks] for name, tags in REASONING_TAGS.items() if tags
    }
