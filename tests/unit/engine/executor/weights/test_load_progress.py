"""The progress of a load, from the weights to the message that a worker's engine sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine.executor.weights.load import LoadProgress, load_weights
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_all_bytes_of_the_files_are_loaded_at_the_end_and_never_fewer(
    family: str, tmp_path: Path
) -> None:
    folder, _ = make_tiny_model(family, tmp_path)
    told: list[tuple[int, int]] = []
    weights = load_weights(
        folder.weight_files,
        folder.config,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        on_progress=lambda *loaded: told.append(loaded),
    )
    list(weights.layers)
    num_bytes = sum(file.stat().st_size for file in folder.weight_files)
    assert told[0] == (0, num_bytes)
    assert told == sorted(told)
    loaded = [first for first, _ in told]
    assert len(set(loaded)) >= folder.config.num_layers + 1
    assert loaded[-1] > 0.99 * num_bytes  # the last norm is not told
    num_told = len(told)
    list(weights.layers)  # for a second decoder
    assert len(told) == num_told


def test_bytes_are_in_proportion_to_elements() -> None:
    told: list[int] = []
    shapes = {"a.x": (10, 2), "a.y": (20,), "b.x": (60,)}
    progress = LoadProgress(shapes, 1000, lambda loaded, _: told.append(loaded))
    for start in ("a.", "a.", "b.", "none."):
        progress.note(start)
    assert told == [0, 400, 1000, 1000]
