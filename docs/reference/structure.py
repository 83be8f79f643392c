"""Prints the structure of the code according to its imports: packages, layers, arrows and cycles.

`make structure` runs it for every package of `tandem`. It draws the outermost one as
docs/images/packages.svg; a test checks that this picture is current.

An arrow means that a module below one child imports a module below another child. Imports inside
functions and under TYPE_CHECKING count. `__main__` modules are ignored, because a program may
import from any layer. The children in the first layer import nothing from their siblings.

It also lists class names that are public in several modules, for a reader to decide whether each
name has one meaning.
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
        """Returns the groups of children that import each other, directly or indirectly."""
        reach = {child: _reachable(child, self.imports) for child in self.imports}
        groups = {
            tuple(sorted(other for other in reach[child] if child in reach[other]))
            for child in self.imports
            if child in reach[child]
        }
        return [list(group) for group in sorted(groups)]

    def needed_imports(self, child: str) -> set[str]:
        """Returns the siblings that `child` imports, without those that its other imports also
        reach."""
        imported = self.imports[child]
        return {
            other
            for other in imported
            if not any(other in _reachable(third, self.imports) for third in imported - {other})
        }

    def layers(self) -> list[list[str]]:
        """Returns the children by layer, lowest first; empty if there is a cycle."""
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
    """Returns the packages at and below `root` that have children, parents before their
    children."""
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
    """Returns the names of public classes that several modules define, with these modules.

    `sources` yields (module name, source text).
    """
    modules = defaultdict(list)
    for module, text in sources:
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(module)
    return {name: found for name, found in sorted(modules.items()) if len(found) > 1}


def to_text(package: Package) -> str:
    """Formats a package as text: its counts, then its layers from the highest to the lowest."""
    layers, cycles = package.layers(), package.cycles()
    lines = [
        f"{package.name}: {len(package.imports)} children, {package.num_arrows} arrows, "
        f"{len(layers) or 'no'} layers"
    ]
    lines += [f"  cycle: {' <-> '.join(cycle)}" for cycle in cycles]
    lines += [f"  {'  '.join(layer)}" for layer in reversed(layers)]
    return "\n".join(lines)


def to_svg(package: Package) -> str:
    """Draws a package as SVG: one box per child, one row per layer, the highest at the top.

    Arrows that follow from other arrows are left out. The package must not have cycles.
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
