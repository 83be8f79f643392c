"""The names of a checkpoint's static scales of KV.

model.layers.N.self_attn.k_scale            as compressed-tensors names them
model.layers.N.self_attn.k_proj.k_scale     as ModelOpt does
model.layers.N.self_attn.qkv_proj.k_scale   where Q, K and V are one matrix
"""

import re

_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv]|qkv)_proj\.)?([kv])_scale")


def place_of_scale(name: str) -> tuple[int, str] | None:
    """Returns the layer, and whether the scale is of k or v; None for the name of no scale."""
    found = _NAME.fullmatch(name)
    if found is None or found[2] not in (None, "qkv", found[3]):
        return None
    return int(found[1]), found[3]
