"""Reads `config_groups` of compressed-tensors, which gives the quantization scheme of each module.

    "config_groups": {NAME: {"targets": [...], "weights": {...}, "format": ...}, ...}

A target is one of:
- the name of a module,
- `re:` and a regular expression that is matched at the start of a module's name,
- `Linear`: all modules that no other target matches.

Patterns are tried in alphabetical order, as in compressed-tensors. `ignore` is not read, because
the tensors of the files show what is quantized. Groups without `weights` describe activations only
and are skipped: Tandem does not use a checkpoint's activation schemes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandem.models.config.quantization_flags import demand, demand_object, refusal
from tandem.models.config.quantization_scheme import Coding, Quantization, Scheme

BLOCK = [128, 128]
GROUP_SIZES = (32, 64, 128)
_ALL = "Linear"
_PATTERN = "re:"
# Patterns with more than _REPEATS_MAX repetitions, or with a repeated group such as (a+)+, are
# refused, because matching them could take exponential time.
_REPEATS = re.compile(r"[*+{]")
_REPEATS_MAX = 6
_REPEATED_GROUP = re.compile(r"\)[*+{]")
# Value of `format` if the groups in `config_groups` have formats of their own.
_MIXED = "mixed-precision"
# Format name -> (coding, type of the numbers, allowed numbers of bits).
_FORMATS: Mapping[str, tuple[Coding, str, tuple[int, ...]]] = {
    "float-quantized": ("scaled", "float", (8,)),
    "int-quantized": ("scaled", "int", (8,)),
    "pack-quantized": ("packed", "int", (4, 8)),
    "nvfp4-pack-quantized": ("fp4", "float", (4,)),
    "mxfp4-pack-quantized": ("fp4", "float", (4,)),
}
# Format name -> allowed values of `strategy`, which says which weights of a matrix share a scale.
_STRATEGIES = {
    "float-quantized": ("tensor", "channel", "block"),
    "int-quantized": ("tensor", "channel"),
    "pack-quantized": ("group", "channel"),
    "nvfp4-pack-quantized": ("tensor_group",),
    "mxfp4-pack-quantized": ("group",),
}
# Number of inputs that share a scale, in formats in which this number is fixed.
_FIXED_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


def read_compressed_tensors(given: Mapping[str, Any]) -> Quantization | None:
    """Returns the schemes of the weights; None if no weights are quantized. Raises UnsupportedModel
    naming a setting that is not supported."""
    if given.get("kv_cache_scheme") and not given.get("config_groups"):
        return None  # The checkpoint quantizes only the KV cache.
    form = demand(given, "format", (*_FORMATS, _MIXED))
    demand(given, "transform_config", (None, {}))
    demand(given.get("sparsity_config") or {}, "format", (None, "dense"), "sparsity_config.format")
    groups = demand_object(given.get("config_groups"), "config_groups")
    if not groups:
        raise refusal("config_groups", groups, "config_groups must have at least one group")
    schemes: dict[str, Scheme] = {}
    for key, group in groups.items():
        name = f"config_groups.{key:.40}"
        if demand_object(group, name).get("weights") is not None:
            schemes |= dict.fromkeys(_targets(group, name), _scheme(group, form, name))
    if not schemes:
        return None
    patterns = sorted(target for target in schemes if target.startswith(_PATTERN))
    by_pattern = tuple((_compiled(target), schemes.pop(target)) for target in patterns)
    return Quantization(schemes.pop(_ALL, None), schemes, by_pattern)


def _targets(group: Mapping[str, Any], name: str) -> list[str]:
    targets = group.get("targets")
    if not (isinstance(targets, list) and targets and all(type(each) is str for each in targets)):
        raise refusal(f"{name}.targets", targets, "targets must be a list of module names")
    return targets


def _compiled(target: str) -> re.Pattern[str]:
    pattern = target.removeprefix(_PATTERN)
    if len(_REPEATS.findall(pattern)) > _REPEATS_MAX or _REPEATED_GROUP.search(pattern):
        raise refusal(
            "a target",
            target,
            "a pattern must not repeat a group, and may have at most six repetitions",
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise refusal(
            "a target", target, f"the pattern is not a valid regular expression: {error}"
        ) from error


def _scheme(group: Mapping[str, Any], form: str, name: str) -> Scheme:
    if form == _MIXED or group.get("format") is not None:
        form = demand(group, "format", tuple(_FORMATS), f"{name}.format")
    coding, kind, widths = _FORMATS[form]
    name = f"{name}.weights"
    weights = demand_object(group.get("weights"), name)

    def checked(key: str, *allowed: Any) -> Any:
        return demand(weights, key, allowed, f"{name}.{key}")

    checked("type", kind)
    bits = checked("num_bits", *widths)
    # No kernel supports zero points of 8-bit weights.
    may_have_zeros = coding == "packed" and bits == 4
    is_symmetric = checked("symmetric", True, None, *([False] if may_have_zeros else []))
    checked("actorder", None, "static", "weight", *(["group"] if coding == "packed" else []))
    strategy = checked("strategy", *_STRATEGIES[form])
    size = 0
    block = None
    if form in _FIXED_GROUPS:
        size = checked("group_size", _FIXED_GROUPS[form])
    elif strategy == "group":
        size = checked("group_size", *GROUP_SIZES)
    if strategy == "block":
        checked("block_structure", BLOCK)
        block = (BLOCK[0], BLOCK[1])
    return Scheme(
        coding,
        bits,
        is_float=kind == "float" and coding != "fp4",
        group_size=size,
        block=block,
        has_zeros=is_symmetric is False,
    )
