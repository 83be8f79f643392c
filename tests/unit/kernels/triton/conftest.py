"""The device of the Triton kernels' tests: CUDA, else Triton's interpreter (`tests/conftest.py`
chooses)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.quick_interpreter import patch_once

patch_once()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m gpu` selects them where there is a device to run them on."""
    if torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)
