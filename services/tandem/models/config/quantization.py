"""Reads `quantization_config` of config.json, which says how a checkpoint's matrices are quantized.

Supported methods are fp8, modelopt, compressed-tensors, gptq and awq. A setting that would change
results and is not supported raises UnsupportedModel, before any weight is read. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.compressed_tensors import BLOCK, GROUP_SIZES, read_compressed_tensors
from tandem.models.config.quantization_flags import NAME, demand, demand_object
from tandem.models.config.quantization_scheme import Quantization, Scheme

_METHODS = ("fp8", "modelopt", "compressed-tensors", "gptq", "awq")
# Allowed values in kv_cache_scheme: fp8_e4m3 with one scale per layer.
_KV_FLAGS: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", None),
    "symmetric": (True, None),
    "dynamic": (False, True, None),
}


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantization schemes; None if the checkpoint is not quantized. Raises
    UnsupportedModel naming the setting that is not supported."""
    given = config.get(NAME)
    if given is None or given == {}:
        return None
    if not isinstance(given, dict):
        raise UnsupportedModel(f"{NAME} is {given!r:.80}; it must be an object")
    method = given.get("quant_method", "an unnamed method")
    if method == "fp8":
        return Quantization(_fp8(given))
    if method == "modelopt":
        demand(given, "quant_algo", ("FP8",))
        return Quantization(Scheme("scaled", 8, is_float=True))
    if method == "compressed-tensors":
        return read_compressed_tensors(given)
    if method == "gptq":
        return Quantization(_gptq(given))
    if method == "awq":
        return Quantization(_awq(given))
    raise UnsupportedModel(
        f"{NAME}.quant_method is {method!r:.80}; supported are {', '.join(_METHODS)}. GGUF "
        "files and models that are not quantized are supported, too"
    )


def has_kv_scales(config: Mapping[str, Any]) -> bool:
    """Returns whether the checkpoint has static scales for a KV cache in fp8_e4m3. Raises
    UnsupportedModel if `kv_cache_scheme` describes another quantization."""
    given = config.get(NAME)
    scheme = given.get("kv_cache_scheme") if isinstance(given, dict) else None
    if scheme is None or scheme == {}:
        return False
    demand_object(scheme, "kv_cache_scheme")
    for flag, allowed in _KV_FLAGS.items():
        demand(scheme, flag, allowed, f"kv_cache_scheme.{flag}")
    return scheme.get("dynamic") is not True


def _fp8(given: Mapping[str, Any]) -> Scheme:
    demand(given, "fmt", ("e4m3", None))
    block = given.get("weight_block_size")
    if block is None:
        return Scheme("scaled", 8, is_float=True)
    demand(given, "weight_block_size", (BLOCK, None))
    return Scheme("scaled", 8, is_float=True, block=(BLOCK[0], BLOCK[1]))


def _gptq(given: Mapping[str, Any]) -> Scheme:
    bits = demand(given, "bits", (4, 8))
    if bits == 8:  # No kernel supports zero points of 8-bit weights.
        demand(given, "sym", (True, None))
    form = demand(given, "checkpoint_format", ("gptq", "gptq_v2", None))
    size = demand(given, "group_size", (*GROUP_SIZES, -1))
    offset = 0 if form == "gptq_v2" else 1
    return Scheme("gptq", bits, group_size=max(size, 0), zero_offset=offset)


def _awq(given: Mapping[str, Any]) -> Scheme:
    demand(given, "bits", (4,))
    demand(given, "version", ("gemm", "GEMM", None))
    demand(given, "zero_point", (True, None))
    return Scheme("awq", 4, group_size=demand(given, "group_size", GROUP_SIZES))
