"""Matrices that compressed-tensors itself packed: the numbers that it reads them as, bit by bit.

`tests/data/compressed_tensors/make.py` wrote them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tandem.models.checkpoint.headers import read_header
from tandem.models.checkpoint.quantized.forms import forms_of_parts, is_quantized
from tandem.models.checkpoint.quantized.tensors import Coded, join_parts
from tandem.models.config.quantization import read_quantization

FOLDER = Path(__file__).parents[4] / "data" / "compressed_tensors"


@pytest.mark.parametrize(
    ("model", "module", "kept"),
    [
        ("W4A16", "", "Q4_0"),
        ("W4A16_ASYM", "", "Q4_Z64"),
        ("W8A16", "", "Q8_0"),
        ("W8A8", "", "Q8_0"),
        ("FP8_DYNAMIC", "", ""),
        ("FP8_BLOCK", "", ""),
        ("MIXED", "mlp.up", "Q4_Z64"),
        ("MIXED", "mlp.down", ""),
        ("MIXED", "self_attn.q", "Q8_0"),
        ("NVFP4A16", "", None),
        ("MXFP4A16", "", "MXFP4"),
    ],
)
def test_a_matrix(model: str, module: str, kept: str | None) -> None:
    """The model has one preset, or several. `kept` is the type of its blocks, "" for fp8, and None
    if there are none."""
    path = FOLDER / f"{'fp4' if 'FP4' in model else 'matrices'}.safetensors"
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()[model])
    name = f"{model}.{module}" if module else model
    stored = {n: each for n, each in load_file(path).items() if n.startswith(f"{name}.")}
    expected = stored.pop(f"{name}.expected")
    quantization = read_quantization({"quantization_config": config})
    assert quantization is not None
    scheme = quantization.of(module)
    assert scheme is not None
    headers = read_header(path).tensors
    assert is_quantized(name, headers, scheme)
    forms = forms_of_parts(name, tuple(expected.shape), headers, scheme)
    assert {part for part, form in forms.items() if not form.is_optional} <= stored.keys()
    assert stored.keys() <= forms.keys()
    for part in stored:
        assert headers[part].shape in forms[part].shapes
        assert headers[part].dtype in forms[part].dtypes
    stored = {f"{module}{part.removeprefix(name)}": each for part, each in stored.items()}
    (coded,) = join_parts(stored, quantization, dict.fromkeys(stored, path)).values()
    assert isinstance(coded, Coded)
    assert coded.shape == tuple(expected.shape)
    assert torch.equal(coded.numbers(), expected)
    if kept is None:
        assert coded.packed() is None
        assert coded.blocks() is None
        return
    assert torch.equal(coded.packed().numbers(), expected)
    blocks: Any = coded.blocks()
    assert torch.equal(blocks.numbers(), expected)
    assert not kept or blocks.type.name == kept
