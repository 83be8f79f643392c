"""`make structure` finds arrows, layers, cycles and repeated class names."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "docs" / "reference" / "structure.py"
structure = runpy.run_path(str(SCRIPT))
Package = structure["Package"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `shop` whose modules import each other at the top, in a function and for types."""
    files = {
        "__init__": "",
        "till": "from shop import stock\n",
        "stock": "def count():\n    import shop.names\n",
        "names": "import typing\nif typing.TYPE_CHECKING:\n    from shop import stock\n",
    }
    (tmp_path / "shop").mkdir()
    for name, text in files.items():
        (tmp_path / "shop" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_imports_in_functions_and_for_types_are_arrows(folder: Path) -> None:
    graph = structure["grimp"].build_graph("shop", cache_dir=None)
    (package,) = structure["read_packages"](graph, "shop")
    assert package.imports == {"till": {"stock"}, "stock": {"names"}, "names": {"stock"}}
    assert package.cycles() == [["names", "stock"]]
    assert package.layers() == []
    assert "cycle: names <-> stock" in structure["to_text"](package)


def test_layers_begin_with_what_imports_nothing() -> None:
    package = Package("p", {"a": frozenset(), "b": frozenset("a"), "c": frozenset("ab")})
    assert package.layers() == [["a"], ["b"], ["c"]]
    assert package.cycles() == []
    assert structure["to_text"](package).splitlines() == [
        "p: 3 children, 3 arrows, 3 layers",
        *("  c", "  b", "  a"),
    ]


def test_a_public_class_of_two_modules_is_named() -> None:
    sources = [("a", "class Load: ..."), ("b", "class Load: ...\nclass _Own: ..."), ("c", "")]
    assert structure["public_classes"](sources) == {"Load": ["a", "b"]}


def test_the_picture_is_that_of_the_code() -> None:
    graph = structure["grimp"].build_graph(
        "tandem", exclude_type_checking_imports=False, cache_dir=None
    )
    drawn = structure["to_svg"](structure["read_packages"](graph, "tandem")[0])
    assert structure["PICTURE"].read_text() == drawn, "run make structure"
