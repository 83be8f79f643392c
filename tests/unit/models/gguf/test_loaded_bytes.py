"""The memory of the tensors of GGUF files is counted as the kernels keep them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from tandem.models.gguf.loaded_bytes import KEPT_TYPES, PACKED_BITS, loaded_bytes
from tandem_kernels.blocks import TYPES
from tandem_kernels.native import library
from tandem_kernels.native.kinds import PANEL
from tests.unit.models import conftest as tiny_gguf

Type = gguf.GGMLQuantizationType
SHAPE = 4 * PANEL, 1024


def test_bits_are_those_of_packed_matrices() -> None:
    native = library.load()
    assert native is not None
    for kind in Type:
        packed = native.kind_of_blocks(kind)
        assert (packed is not None) == (kind in PACKED_BITS), kind.name
        if packed is not None:
            bits = 8 * native.quantized_bytes(SHAPE, packed) / (SHAPE[0] * SHAPE[1])
            assert bits == PACKED_BITS[kind], kind.name


def test_kept_types_are_those_that_torch_expands() -> None:
    assert {int(kind) for kind in KEPT_TYPES} == TYPES.keys() & {int(kind) for kind in Type}


@pytest.mark.parametrize(
    ("name", "native_bits", "torch_bits"),
    [("Q8_0", 8.5, 8.5), ("Q2_K", 4, 16), ("TQ1_0", 2.5, 16), ("IQ2_XXS", 16, 16), ("F32", 32, 32)],
)
def test_a_matrix_of_each_form(
    name: str, native_bits: float, torch_bits: float, tmp_path: Path
) -> None:
    """The compute dtype has 16 bits. Nothing becomes smaller than it is in the file."""
    num_out, num_in = SHAPE
    _, num_bytes = gguf.GGML_QUANT_SIZES[Type[name]]
    row_bytes = num_in * num_bytes // gguf.GGML_QUANT_SIZES[Type[name]][0]
    tensors = {"blk.0.ffn_up.weight": np.zeros((num_out, row_bytes), np.uint8)}
    if name == "F32":
        tensors = {"blk.0.ffn_up.weight": np.zeros(SHAPE, np.float32)}
    types = {"blk.0.ffn_up.weight": None if name == "F32" else Type[name]}
    # The file also has a table of RoPE, which is part of the config.
    tensors["rope_freqs.weight"] = np.ones(64, np.float32)
    file = tiny_gguf.write_gguf(tmp_path / "one.gguf", tensors, types=types)
    for is_native, bits in ((True, native_bits), (False, torch_bits)):
        found = loaded_bytes([file], is_native=is_native, dtype_bytes=2, has_latents=False)
        assert found == num_out * num_in * bits / 8


def test_matrices_of_latents_become_numbers(tmp_path: Path) -> None:
    num_out, num_in = SHAPE
    names = ("attn_kv_b", "attn_output")
    tensors = {
        f"blk.0.{name}.weight": np.zeros((num_out, num_in // 32 * 34), np.uint8) for name in names
    }
    types = dict.fromkeys(tensors, Type.Q8_0)
    file = tiny_gguf.write_gguf(tmp_path / "one.gguf", tensors, types=types)
    found = loaded_bytes([file], is_native=True, dtype_bytes=4, has_latents=True)
    assert found == num_out * num_in * (4 + 8.5 / 8)
