"""Tests of whole models, also on Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.quick_interpreter import patch_once, unchecked_sums

patch_once()


@pytest.fixture(scope="module", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Tests of the kernels themselves find what overflows."""
    with unchecked_sums():
        yield
