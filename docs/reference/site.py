"""MkDocs hooks of the documentation site (mkdocs.yml).

The repository's pages link to each other by their paths in the repository, so that they can be read
there, too. The site has the folder `docs/` as its root. The hooks therefore

- add the pages outside of `docs/` (README.md becomes the first page of the site);
- add a copy of every other file that a page links to, below `source/`;
- rewrite links that leave `docs/`, and relative links of the added pages;
- replace the one script that the theme would load from another site;
- accept lists as CommonMark has them, which Python-Markdown does not: indented by two spaces, and
  without an empty line before them.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from markdown import Markdown
from markdown.extensions import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
# pages outside of docs/: path in the repository -> path in the site
ADDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "services/README.md": "one_request.md",
}
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_ELSEWHERE = re.compile(r"[a-z]+:|#")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r" *(?:[-*]|\d+\.) ")
_SHIM = re.compile(r"https://[^\"]+/iframe-worker/shim")
# Browsers show these as they are. Other files get a suffix, so that a browser shows them as text.
_SHOWN = {".json", ".png", ".svg", ".html", ".txt"}


class TwoSpaces(Extension):
    """Makes two spaces enough for a list in a list. It has to be the first extension."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.tab_length = 2
        md.build_parser()  # the processors of blocks read the length when they are made


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.insert(0, TwoSpaces())  # type: ignore[arg-type]
    # anchors as in the repository
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, place in ADDED.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text("utf-8")))
    for file in list(files.documentation_pages()):
        for path in _targets(file):
            place = _place(path)
            if files.get_file_from_path(place) is None and (ROOT / path).is_file():
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return _outside_of_fences(markdown, lambda text: _with_links(_with_lists(text), page.file))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    up = "../" * page.file.dest_uri.count("/")
    return _SHIM.sub(f"{up}offline_search.js", output)


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    return _SHIM.sub("offline_search.js", output)


def _outside_of_fences(markdown: str, change: Callable[[str], str]) -> str:
    found: list[str] = []
    at = 0
    for fence in _FENCE.finditer(markdown):
        found += [change(markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*found, change(markdown[at:])])


def _with_lists(text: str) -> str:
    """Puts an empty line before each list that follows a paragraph without one."""
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        starts = _ITEM.match(line) and before.strip() and not _is_in_list(lines, line)
        lines += ["", line] if starts else [line]
    return "\n".join(lines)


def _is_in_list(lines: list[str], item: str) -> bool:
    """Returns whether an item of the list to which `item` belongs is above, without an empty line
    between them."""
    depth = len(item) - len(item.lstrip())
    for line in reversed(lines):
        if not line.strip():
            return False
        if len(line) - len(line.lstrip()) <= depth:
            return _ITEM.match(line) is not None
    return False


def _with_links(text: str, file: File) -> str:
    folder = posixpath.dirname(file.src_uri)

    def link(found: re.Match[str]) -> str:
        if _ELSEWHERE.match(found[0]):
            return found[0]
        path, _, anchor = found[0].partition("#")
        place = posixpath.relpath(_place(_in_repository(file, path)), folder or ".")
        return f"{place}#{anchor}" if anchor else place

    return _LINK.sub(link, text)


def _targets(file: File) -> set[str]:
    """Returns the paths in the repository to which a page links."""
    text = _FENCE.sub("", file.content_string)
    links = (link for link in _LINK.findall(text) if not _ELSEWHERE.match(link))
    return {_in_repository(file, link.partition("#")[0]) for link in links}


def _in_repository(file: File, link: str) -> str:
    origins = {place: path for path, place in ADDED.items()}
    origin = origins.get(file.src_uri, f"docs/{file.src_uri}")
    return os.path.normpath(posixpath.join(posixpath.dirname(origin), link))


def _place(path: str) -> str:
    """Returns where the site has a file of the repository."""
    if path in ADDED:
        return ADDED[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    suffix = "" if Path(path).suffix in _SHOWN else ".txt"
    return f"source/{path}{suffix}"
