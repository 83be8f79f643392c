"""Prints the structure of the code as its imports show it: packages, layers, arrows, cycles.

`make structure` runs it for every package of `tandem`, and draws the outermost one in
docs/images/packages.svg, which a test compares. An arrow is at least one import of a module
below one child by a module below another child; imports inside functions and under TYPE_CHECKING
count. A `__main__` module counts as no part of its package: a program stands above it. The first
layer imports nothing from its siblings. A class name that is public in several
modules is listed: a reader decides whether it has one meaning.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "services" / "tandem"
PICTURE = ROOT / "docs" / "images" / "packages.svg"
GENERATED = "tandem.net.rpc.tandem"
_BOX_WIDTH, _BOX_HEIGHT, _GAP, _ROW_GAP = 120, 34, 24, 44  # pixels
_STYLE = """  <style>
    .box { fill: #f6f8fa; stroke: #57606a; stroke-width: 1.5; }
    .line { stroke: #8c959f; stroke-width: 1.5; marker-end: url(#tip); }
    .tip { fill: #8c959f; }
    text { fill: #1f2328; font: 13px Helvetica, Arial, sans-serif; text-anchor: middle; }
    @media (prefers-color-scheme: dark) {
      .box { fill: #161b22; stroke: #8b949e; }
      text { fill: #e6edf3; }
    }
  </style>
  <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" orient="auto"
    markerWidth="7" markerHeight="7">
    <path class="tip" d="M0,0 L8,4 L0,8 z"/>
  </marker>"""


@dataclass(frozen=True, slots=True)
class Package:
    """A package's children and the imports between them.

    `imports` has an entry for every child: the names of the siblings that it imports.
    """

    name: str
    imports: Mapping[str, frozenset[str]]

    @property
    def num_arrows(self) -> int:
        return sum(map(len, self.imports.values()))

    def cycles(self) -> list[list[str]]:
        """Groups of children that import each other, directly or through others."""
        reach = {child: _reachable(child, self.imports) for child in self.imports}
        groups = {
            tuple(sorted(other for other in reach[child] if child in reach[other]))
            for child in self.imports
            if child in reach[child]
        }
        return [list(group) for group in sorted(groups)]

    def needed_imports(self, child: str) -> set[str]:
        """What `child` imports, less what its other imports import anyway."""
        imported = self.imports[child]
        return {
            other
            for other in imported
            if not any(other in _reachable(third, self.imports) for third in imported - {other})
        }

    def layers(self) -> list[list[str]]:
        """Children from the lowest layer to the highest; empty if there is a cycle."""
        sorter = TopologicalSorter(self.imports)
        found = []
        try:
            sorter.prepare()
        except CycleError:
            return []
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            found.append(ready)
            sorter.done(*ready)
        return found


def read_packages(graph: grimp.ImportGraph, root: str) -> list[Package]:
    """Packages at and below `root` that have children, each before the packages inside it."""
    packages = []
    for name in sorted({root, *graph.find_descendants(root)}):
        children = sorted(graph.find_children(name))
        if name.startswith(GENERATED) or not children:
            continue
        imports: dict[str, set[str]] = {child.rpartition(".")[2]: set() for child in children}
        for child in children:
            short = child.rpartition(".")[2]
            for module in {child, *graph.find_descendants(child)}:
                if module.endswith(".__main__"):
                    continue
                for imported in graph.find_modules_directly_imported_by(module):
                    if imported.startswith(name + "."):
                        other = imported[len(name) + 1 :].partition(".")[0]
                        if other != short:
                            imports[short].add(other)
        packages.append(Package(name, {c: frozenset(i) for c, i in imports.items()}))
    return packages


def public_classes(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Modules by the name of a public class that more than one of them defines.

    `sources` are names of modules with their text.
    """
    modules = defaultdict(list)
    for module, text in sources:
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(module)
    return {name: found for name, found in sorted(modules.items()) if len(found) > 1}


def to_text(package: Package) -> str:
    """One package as lines: its counts, then its layers from the highest to the lowest."""
    layers, cycles = package.layers(), package.cycles()
    lines = [
        f"{package.name}: {len(package.imports)} children, {package.num_arrows} arrows, "
        f"{len(layers) or 'no'} layers"
    ]
    lines += [f"  cycle: {' <-> '.join(cycle)}" for cycle in cycles]
    lines += [f"  {'  '.join(layer)}" for layer in reversed(layers)]
    return "\n".join(lines)


def to_svg(package: Package) -> str:
    """A picture: a box for each child, a row for each layer, the highest at the top.

    An arrow that follows from others is left out. There may be no cycle.
    """
    rows = list(reversed(package.layers()))
    width = max(map(len, rows)) * (_BOX_WIDTH + _GAP) + _GAP
    height = len(rows) * (_BOX_HEIGHT + _ROW_GAP) - _ROW_GAP + 2 * _GAP
    at = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (_BOX_WIDTH + _GAP) + _GAP) // 2
        for place, child in enumerate(row):
            at[child] = (
                left + place * (_BOX_WIDTH + _GAP),
                _GAP + number * (_BOX_HEIGHT + _ROW_GAP),
            )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" aria-labelledby="title">',
        f'  <title id="title">Packages of {package.name} and what they import</title>',
        _STYLE,
    ]
    for child, (left, top) in at.items():
        for other in sorted(package.needed_imports(child)):
            x, y = at[other]
            lines.append(
                f'  <line class="line" x1="{left + _BOX_WIDTH // 2}" y1="{top + _BOX_HEIGHT}"'
                f' x2="{x + _BOX_WIDTH // 2}" y2="{y - 2}"/>'
            )
    for child, (left, top) in at.items():
        lines += [
            f'  <rect class="box" x="{left}" y="{top}" width="{_BOX_WIDTH}"'
            f' height="{_BOX_HEIGHT}" rx="6"/>',
            f'  <text x="{left + _BOX_WIDTH // 2}" y="{top + _BOX_HEIGHT // 2 + 5}">{child}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    graph = grimp.build_graph("tandem", exclude_type_checking_imports=False, cache_dir=None)
    packages = read_packages(graph, "tandem")
    PICTURE.write_text(to_svg(packages[0]), encoding="utf-8")
    for package in packages:
        print(to_text(package))
    files = [path for path in SOURCES.rglob("*.py") if "rpc/tandem" not in path.as_posix()]
    sources = [(str(p.relative_to(SOURCES)), p.read_text(encoding="utf-8")) for p in sorted(files)]
    for name, modules in public_classes(sources).items():
        print(f"class {name}: {', '.join(modules)}")
    num_cycles = sum(len(package.cycles()) for package in packages)
    print(f"{len(packages)} packages, {num_cycles} cycles")


def _reachable(start: str, imports: Mapping[str, frozenset[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


if __name__ == "__main__":
    main()
