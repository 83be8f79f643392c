"""Reads from `quantization_config` of config.json how a checkpoint's matrices are quantized.

Methods: fp8, modelopt, compressed-tensors, gptq and awq. Whatever would change a number and is not
known here is refused by the name of its flag, before any weight is read. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.errors import UnsupportedModel

Coding = Literal["scaled", "packed", "gptq", "awq"]
_FLAG = "quantization_config"
_METHODS = ("fp8", "modelopt", "compressed-tensors", "gptq", "awq")
# Of compressed-tensors: coding, type, bits.
_FORMATS: Mapping[str, tuple[Coding, str, tuple[int, ...]]] = {
    "float-quantized": ("scaled", "float", (8,)),
    "int-quantized": ("scaled", "int", (8,)),
    "pack-quantized": ("packed", "int", (4, 8)),
}
_STRATEGIES = {  # what shares a scale
    "float-quantized": ("tensor", "channel", "block"),
    "int-quantized": ("tensor", "channel"),
    "pack-quantized": ("group", "channel"),
}
_BLOCK = [128, 128]
_GROUP_SIZES = (32, 64, 128)
_KV_FLAGS: Mapping[str, tuple[Any, ...]] = {  # of kv_cache_scheme: fp8_e4m3, a scale a layer
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", None),
    "symmetric": (True, None),
    "dynamic": (False, True, None),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The form of each quantized matrix [out, in]; scales and zeros are the checkpoint's.

    scaled: `weight` in fp8 or int8, and `weight_scale` or `weight_scale_inv`.
    packed: `weight_packed` and `weight_scale` of compressed-tensors.
    gptq, awq: `qweight`, `qzeros` and `scales`, of [in, out].
    """

    coding: Coding
    bits: int
    is_float: bool = False
    group_size: int = 0  # inputs that share a scale; 0: all of a row or of the matrix
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    zero_offset: int = 0  # what is added to stored zeros

    @property
    def growth_max(self) -> float:
        """Returns by how much a matrix may grow when it is repacked. Integers become blocks with a
        scale, and a zero, for each 32 inputs or 64. In fp8 each output gets scales."""
        if self.is_float:
            return 1.04
        return 4.5 / 4 if self.bits == 4 else 8.5 / 8


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Returns the scheme; None of a checkpoint that is not quantized. Raises UnsupportedModel."""
    given = config.get(_FLAG)
    if given is None or given == {}:
        return None
    if not isinstance(given, dict):
        raise UnsupportedModel(f"{_FLAG} is {given!r:.80}; it must be an object")
    method = given.get("quant_method", "an unnamed method")
    if method == "fp8":
        return _fp8(given)
    if method == "modelopt":
        _demand(given, "quant_algo", ("FP8",))
        return Scheme("scaled", 8, is_float=True)
    if method == "compressed-tensors":
        return _compressed_tensors(given)
    if method == "gptq":
        return _gptq(given)
    if method == "awq":
        return _awq(given)
    raise UnsupportedModel(
        f"{_FLAG}.quant_method is {method!r:.80}; supported are {', '.join(_METHODS)}, weights "
        "that are not quantized, and GGUF files"
    )


def has_kv_scales(config: Mapping[str, Any]) -> bool:
    """Returns whether the config says that the checkpoint has static scales for KV in fp8_e4m3.
    Raises UnsupportedModel for another form of KV."""
    given = config.get(_FLAG)
    scheme = given.get("kv_cache_scheme") if isinstance(given, dict) else None
    if scheme is None or scheme == {}:
        return False
    if not isinstance(scheme, dict):
        raise UnsupportedModel(f"{_FLAG}: kv_cache_scheme is {scheme!r:.80}; it must be an object")
    for flag, allowed in _KV_FLAGS.items():
        _demand(scheme, flag, allowed, f"kv_cache_scheme.{flag}")
    return scheme.get("dynamic") is not True


def _fp8(given: Mapping[str, Any]) -> Scheme:
    _demand(given, "fmt", ("e4m3", None))
    block = given.get("weight_block_size")
    if block is None:
        return Scheme("scaled", 8, is_float=True)
    _demand(given, "weight_block_size", (_BLOCK, None))
    return Scheme("scaled", 8, is_float=True, block=(128, 128))


def _compressed_tensors(given: Mapping[str, Any]) -> Scheme | None:
    if given.get("kv_cache_scheme") and not given.get("config_groups"):
        return None  # weights are as they were
    found = _demand(given, "format", tuple(_FORMATS))
    coding, kind, widths = _FORMATS[found]
    _demand(given, "transform_config", (None, {}))
    sparsity = given.get("sparsity_config") or {}
    _demand(sparsity, "format", (None, "dense"), "sparsity_config.format")
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise UnsupportedModel(f"{_FLAG}.config_groups must have one group, which all layers share")
    group = next(iter(groups.values()))
    if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
        raise UnsupportedModel(f"{_FLAG}.config_groups has no weights")
    _demand(group, "targets", (["Linear"],), "targets")
    _demand(weights, "type", (kind,), "weights.type")
    bits = _demand(weights, "num_bits", widths, "weights.num_bits")
    _demand(weights, "symmetric", (True, None), "weights.symmetric")
    _demand(weights, "actorder", (None, "static", "weight"), "weights.actorder")
    strategy = _demand(weights, "strategy", _STRATEGIES[found], "weights.strategy")
    size, block = 0, None
    if strategy == "group":
        size = _demand(weights, "group_size", _GROUP_SIZES, "weights.group_size")
    if strategy == "block":
        _demand(weights, "block_structure", (_BLOCK,), "weights.block_structure")
        block = (128, 128)
    return Scheme(coding, bits, is_float=kind == "float", group_size=size, block=block)


def _gptq(given: Mapping[str, Any]) -> Scheme:
    _demand(given, "bits", (4,))
    form = _demand(given, "checkpoint_format", ("gptq", "gptq_v2", None))
    size = _demand(given, "group_size", (*_GROUP_SIZES, -1))
    return Scheme("gptq", 4, group_size=max(size, 0), zero_offset=0 if form == "gptq_v2" else 1)


def _awq(given: Mapping[str, Any]) -> Scheme:
    _demand(given, "bits", (4,))
    _demand(given, "version", ("gemm", "GEMM", None))
    _demand(given, "zero_point", (True, None))
    return Scheme("awq", 4, group_size=_demand(given, "group_size", _GROUP_SIZES))


def _demand(given: Any, key: str, allowed: tuple[Any, ...], name: str = "") -> Any:
    value = given.get(key) if isinstance(given, dict) else given
    # True equals 1, and a list cannot be looked up in a set.
    if not any(value == each and type(value) is type(each) for each in allowed):
        raise _refusal(name or key, value, allowed)
    return value


def _refusal(name: str, value: Any, allowed: tuple[Any, ...]) -> UnsupportedModel:
    shown = ", ".join("nothing" if each is None else str(each) for each in allowed)
    return UnsupportedModel(f"{_FLAG}: {name} is {value!r:.80}; supported are {shown}")
