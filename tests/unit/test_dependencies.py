"""Imports are declared in pyproject.toml, and declared packages are imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = {"tandem", "tandem_kernels"}
# NIXL is imported by a name that is put together.
# mkdocs-material is a plugin of mkdocs, which the docs use by its command.
NOT_SEEN = {"nixl-cu12", "mkdocs-material"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in requirements}


def imported() -> set[str]:
    """Top-level names of other projects' packages."""
    names = set()
    for folder in ("services/tandem", "kernels/tandem_kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - OURS


def project() -> tuple[set[str], set[str]]:
    """Distributions of every installation, and those of extras that are not for developers."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {k: v for k, v in read["optional-dependencies"].items() if k != "dev"}
    return declared(read["dependencies"]), {n for v in extras.values() for n in declared(v)}


def test_every_import_is_of_a_declared_package() -> None:
    plain, optional = project()
    owners = packages_distributions()
    undeclared = {
        name: owners.get(name, [])
        for name in imported()
        if not (plain | optional) & {normal(owner) for owner in owners.get(name, [])}
    }
    assert undeclared == {}


def test_every_declared_package_is_imported() -> None:
    plain, optional = project()
    owners = packages_distributions()
    used = {normal(owner) for name in imported() for owner in owners.get(name, [])}
    assert (plain | optional) - used - NOT_SEEN == set()
