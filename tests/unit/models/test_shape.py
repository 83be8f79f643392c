"""A model's shape without its weights, and the number of its parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.models.shape import num_parameters, read_shape
from tandem.models.source import built_in_file, resolve
from tests.tiny_models import FAMILIES, make_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_transformers_does(family: str, tmp_path: Path) -> None:
    folder, model = make_tiny_model(family, tmp_path)
    buffers = sum(
        buffer.numel() for name, buffer in model.named_buffers() if name in model.state_dict()
    )
    assert num_parameters(folder.config) == model.num_parameters() + buffers
    assert read_shape(str(tmp_path)) == folder.config
    assert read_shape(str(tmp_path / "config.json")) == folder.config


def test_a_gguf_file_has_the_shape_of_its_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = resolve("smollm2").config
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    assert read_shape(str(built_in_file())) == converted
    assert list(tmp_path.iterdir()) == []
