"""Checkpoints to measure: the built-in model's weights in AWQ, GPTQ and fp8, AWQ's as GGUF, too.

    python -m benchmarks.peers.quantized_folders AWQ

makes one, if it is not there, and prints its path. Numbers are rounded to the nearest. Embeddings,
which are the output matrix too, are bf16 in all of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.quantized_files import FOLDER, written
from benchmarks.peers.vllm_processes import dense_folder
from tandem_bench.framework import run_main

GROUP = 64  # inputs; the built-in model's rows are no multiple of 128
_BLOCK = 128  # outputs and inputs that share a scale in fp8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the number in each nibble of a word
_CONFIGS = {
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]},
}


def checkpoint(kind: str) -> str:
    """Returns the folder of a kind, AWQ, GPTQ or fp8, which is written once."""
    made = FOLDER.parent / f"smollm2-{kind.lower()}"
    if not made.exists():
        source, unfinished = dense_folder("smollm2"), made.with_suffix(".unfinished")
        shutil.copytree(source, unfinished, dirs_exist_ok=True)
        parts = {"AWQ": _awq, "GPTQ": _gptq, "fp8": _fp8}[kind]
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(source / "model.safetensors").items():
            if name.endswith("_proj.weight"):
                stored |= parts(name.removesuffix("weight"), tensor)
            else:
                stored[name] = tensor.bfloat16()
        save_file(stored, unfinished / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        config |= {"torch_dtype": "bfloat16", "quantization_config": _CONFIGS[kind]}
        (unfinished / "config.json").write_text(json.dumps(config))
        unfinished.rename(made)
    return str(made)


def awq_as_q5_0() -> str:
    """Returns a GGUF file with the very weights of the checkpoint in AWQ."""

    def add_tensors(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
        for tensor in reader.tensors:
            data, kind = tensor.data, tensor.tensor_type
            if len(tensor.shape) > 1:
                numbers = torch.from_numpy(gguf.dequantize(data, kind))
                if tensor.name.startswith("blk."):
                    data, kind = _q5_0(*_rounded(numbers)), gguf.GGMLQuantizationType.Q5_0
                else:
                    data = numbers.bfloat16().view(torch.uint8).numpy()
                    kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, data, raw_dtype=kind)

    return written("SmolLM2-135M-Instruct.AWQ-as-Q5_0.gguf", {}, add_tensors)


def checkpoint_bytes(folder: str) -> int:
    """Returns the bytes of a checkpoint's matrices, with their scales and zeros."""
    tensors = load_file(Path(folder) / "model.safetensors").values()
    return sum(tensor.nbytes for tensor in tensors if tensor.ndim > 1)


def _rounded(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns numbers [out, groups, inputs of a group], zeros and scales [out, groups, 1]."""
    groups = weights.view(len(weights), -1, GROUP)
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    numbers = ((groups / scales.float()).round() + zeros).clamp(0, 15)
    return numbers.int(), zeros.int(), scales


def _awq(stem: str, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    numbers, zeros, scales = (part.flatten(1).t() for part in _rounded(weights))
    return {
        f"{stem}qweight": _words(numbers, _AWQ_ORDER),
        f"{stem}qzeros": _words(zeros, _AWQ_ORDER),
        f"{stem}scales": scales.contiguous(),
    }


def _gptq(stem: str, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the parts of a matrix without the order of activations. All zeros are 8, which the
    format stores as 7."""
    groups = weights.view(len(weights), -1, GROUP)
    scales = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-6).half()
    numbers = ((groups / scales.float()).round() + 8).clamp(0, 15).flatten(1)
    scales = scales.flatten(1).t()
    return {
        f"{stem}qweight": _words(numbers, range(8)).t().contiguous(),
        f"{stem}qzeros": _words(torch.full(scales.shape, 7), range(8)),
        f"{stem}scales": scales.contiguous(),
    }


def _words(numbers: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Returns eight numbers of a row in each int32."""
    of_word = numbers.reshape(len(numbers), -1, 8)[..., list(order)]
    words = torch.sum(of_word.long() << 4 * torch.arange(8), -1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def _fp8(stem: str, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    num_out, num_in = weights.shape
    rows, columns = -(-num_out // _BLOCK), -(-num_in // _BLOCK)
    padded = torch.zeros(rows * _BLOCK, columns * _BLOCK)
    padded[:num_out, :num_in] = weights
    scales = padded.view(rows, _BLOCK, columns, _BLOCK).abs().amax((1, 3)) / 448
    of_weights = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    codes = (weights / of_weights[:num_out, :num_in]).to(torch.float8_e4m3fn)
    return {f"{stem}weight": codes, f"{stem}weight_scale_inv": scales}


def _q5_0(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Returns rows of blocks of 32 inputs, whose zero is 16."""
    five = (numbers + 16 - zeros).byte().view(len(numbers), -1, 32).numpy()
    halves = scales.repeat_interleave(GROUP // 32, 1).contiguous().view(torch.uint8).numpy()
    high = np.packbits(five >> 4, axis=-1, bitorder="little")
    low = five & 15
    return np.concatenate((halves, high, low[..., :16] | low[..., 16:] << 4), -1).reshape(
        len(five), -1
    )


def main(kind: Literal["AWQ", "GPTQ", "fp8"], /) -> None:
    print(checkpoint(kind))


if __name__ == "__main__":
    run_main(main)
