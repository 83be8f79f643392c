"""Matrices that the native kernels round to int8 have the numbers of the rounded matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.common.sampling_params import SamplingParams
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder
from tests.engine_driver import drive_all, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model

_PROMPT = torch.randint(0, 203, (150,), generator=torch.Generator().manual_seed(1)).tolist()
_WITH_LOGPROBS = SamplingParams(temperature=0, logprobs=1)
_SLOW = ("llama", "deepseek-v3", "qwen3-next", "glm5", "minimax-m3", "gemma3n", "gemma4-moe")


def _round_matrices(path: Path) -> ModelFolder:
    """Rounds each row of each matrix to 127 steps of its largest number, so that weights of int8
    lose nothing."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.ndim > 1:
                step = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-20) / 127
                tensors[name] = (tensor / step).round() * step
        save_file(tensors, file, metadata={"format": "pt"})
    return read_folder(path)


def _run(folder: ModelFolder, weights: str) -> tuple[list[int], torch.Tensor]:
    engine, runner = make_model_engine(
        folder,
        dtype="float32",
        kernels="native",
        weights=weights,
        block_size=16,
        num_blocks=60,
        max_tokens_per_step=64,
    )
    assert runner.dtype_name == ("float32+int8" if weights == "int8" else "float32")
    outcome = drive_all(engine, make_spec("a", _PROMPT, max_tokens=12, sampling=_WITH_LOGPROBS))
    news = [one for report in outcome.reports for new in report.new_tokens for one in new.logprobs]
    return outcome.token_ids["a"], torch.tensor([each.logprob for each in news])


@pytest.mark.parametrize(
    "family", ["deepseek-v4", *(pytest.param(each, marks=pytest.mark.slow) for each in _SLOW)]
)
def test_weights_of_int8_are_the_rounded_matrices(family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    whole, whole_logprobs = _run(read_folder(tmp_path), "auto")
    folder = _round_matrices(tmp_path)
    expected, logprobs = _run(folder, "auto")
    found, found_logprobs = _run(folder, "int8")
    assert found == expected
    assert torch.allclose(found_logprobs, logprobs, atol=1e-4)
    same = whole == expected and torch.allclose(whole_logprobs, logprobs, atol=1e-4)
    assert not same, "rounding changes nothing, so this test could not fail"
