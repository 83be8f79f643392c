"""A process that loads a model grows by its tensors once, and by few more while it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader

from tandem.models.source import resolve
from tests.tiny_models import make_tiny_model

_GROWTH_MAX = 1.15  # times the tensors' bytes
_MORE_AT_PEAK = 2  # tensors
_NUM_BYTES = {"float32": 4, "bfloat16": 2}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """A folder with 250 MB of weights in float32, and the number of weights of each tensor.

    As usual the embedding is the largest: a layer's tensors are there at once before it is packed.
    """
    folder = tmp_path_factory.mktemp("random")
    sizes = {"vocab_size": 16_000, "hidden_size": 768, "intermediate_size": 2048}
    _, model = make_tiny_model("llama", folder, num_hidden_layers=6, **sizes)
    return str(folder), [parameter.numel() for parameter in model.parameters()]


def check(model: str, dtype: str, num_bytes: list[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine.load_growth", model, dtype],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    stayed, peak = map(int, done.stdout.split())
    assert stayed <= _GROWTH_MAX * sum(num_bytes)
    assert peak <= _GROWTH_MAX * sum(num_bytes) + _MORE_AT_PEAK * max(num_bytes)
    # Else it was not measured: rows of an embedding are read from the file as tokens need them.
    assert stayed >= sum(num_bytes) - max(num_bytes) - 10_000_000


@pytest.mark.parametrize("dtype", _NUM_BYTES)
def test_a_folder(random_model: tuple[str, list[int]], dtype: str) -> None:
    folder, numbers = random_model
    check(folder, dtype, [number * _NUM_BYTES[dtype] for number in numbers])


def test_a_gguf_file_as_it_is() -> None:
    (file,) = resolve("smollm2").weight_files
    check("smollm2", "auto", [int(tensor.n_bytes) for tensor in GGUFReader(file).tensors])


def test_a_gguf_file_that_is_converted() -> None:
    (file,) = resolve("smollm2").weight_files
    check(
        "smollm2", "bfloat16", [2 * int(tensor.n_elements) for tensor in GGUFReader(file).tensors]
    )
