"""The page of families agrees with the families, and the tests have a checkpoint of each."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from tandem.models.config.families import FAMILIES
from tests.harness.documents import ROOT
from tests.tiny_models import families_of


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families", ROOT / "docs/reference/families.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_families(writer: ModuleType) -> None:
    text = writer.PAGE.read_text("utf-8")
    assert text == writer.page(), "families.md is old: run python -m docs.reference.families"
    rows = re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    assert rows == [*FAMILIES, *FAMILIES]


def test_every_family_has_a_checkpoint_and_a_file_of_each_kind(writer: ModuleType) -> None:
    for name in FAMILIES:
        assert families_of(name), f"tests/tiny_models.py has no {name}"
        if writer._gguf_names(name):
            assert writer.files_of(name), f"gguf/test_families.py has no {name}"


def test_both_tables_of_models_name_every_family() -> None:
    text = (ROOT / "docs" / "adding_a_model.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+ForCausalLM)`", text, re.MULTILINE)) == set(FAMILIES)
