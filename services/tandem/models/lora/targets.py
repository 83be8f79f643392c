"""Finds the matrices of a model that an adapter changes, by PEFT's rules for `target_modules`.

The value of `target_modules` is one of:
- a list of ends of module names,
- a regular expression for whole module names,
- `all-linear`: every linear layer except the output matrix.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.layers import LayerSpec
from tandem.models.config.model import ModelConfig
from tandem.models.limits import why_irregular
from tandem.models.lora.patterns import Pattern, match_all

_IN_A_LIST = re.compile(r".*\.[^.]*\.(\d+)\.")
ALL_LINEAR = "all-linear"
# Prefix of the MLP modules that an adapter can change in a layer with experts. Other layers have
# the prefix "mlp.".
SHARED_MLP = "mlp.shared_experts."
# Modules that PEFT can adapt and Tandem cannot.
_OTHERS = ("lm_head", "model.embed_tokens", "model.norm")


def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the shape (outputs, inputs) of each matrix that an adapter may change, by name."""
    attention = _attention_shapes(model)
    return {
        f"model.layers.{layer}.{name}": shape
        for layer, spec in enumerate(model.layers)
        for name, shape in (attention | _mlp_shapes(model, spec)).items()
    }


def _mlp_shapes(model: ModelConfig, spec: LayerSpec) -> dict[str, tuple[int, int]]:
    """Returns the shapes of a layer's MLP, or of its shared experts in a layer with experts."""
    hidden = model.hidden_size
    inner = model.intermediate_size
    place = "mlp."
    if spec.experts is not None:
        inner = spec.experts.shared_inner
        place = SHARED_MLP
        if not inner:
            return {}
    shapes = {f"{place}down_proj": (hidden, inner)}
    if model.has_fused_mlp:
        return shapes | {f"{place}gate_up_proj": (2 * inner, hidden)}
    return shapes | dict.fromkeys((f"{place}gate_proj", f"{place}up_proj"), (inner, hidden))


def _attention_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    hidden = model.hidden_size
    num_heads = model.num_attention_heads
    if (latent := model.latent) is not None:
        queries = {"self_attn.q_proj": (num_heads * latent.q_dim, hidden)}
        if latent.q_rank is not None:
            queries = {
                "self_attn.q_a_proj": (latent.q_rank, hidden),
                "self_attn.q_b_proj": (num_heads * latent.q_dim, latent.q_rank),
            }
        per_head = num_heads * (latent.plain_dim + latent.value_dim)
        return queries | {
            "self_attn.kv_a_proj_with_mqa": (latent.kv_dim, hidden),
            "self_attn.kv_b_proj": (per_head, latent.kv_rank),
            "self_attn.o_proj": (hidden, num_heads * latent.value_dim),
        }
    q_size = num_heads * model.head_dim
    kv_size = model.num_kv_heads * model.head_dim
    out = {"self_attn.o_proj": (hidden, q_size)}
    if model.has_fused_qkv:
        return out | {"self_attn.qkv_proj": (q_size + 2 * kv_size, hidden)}
    per_token = dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv_size, hidden))
    return out | per_token | {"self_attn.q_proj": (q_size, hidden)}


def find_modules(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Returns the names of the matrices that an adapter_config.json targets. Raises
    UnsupportedModel naming a target that the model does not have or that is not supported."""
    if why := why_irregular(model):
        raise UnsupportedModel(f"adapters are not supported for this model: {why}")
    linears = linear_shapes(model)
    targets = config.get("target_modules")
    layers = _layers(config)
    if not targets or not isinstance(targets, str | list):
        raise UnsupportedModel(
            f"target_modules is {targets!r:.80}; it must name modules: {_allowed(linears)}"
        )
    names = [*linears, *_OTHERS]
    if targets == ALL_LINEAR:
        found = list(linears)
    elif isinstance(targets, str):
        found = _matching("target_modules", targets, names)
    else:
        for target in targets:
            if not any(_ends_with(name, [target]) for name in linears):
                is_other = any(_ends_with(name, [target]) for name in _OTHERS)
                raise UnsupportedModel(
                    f"target_modules has {target!r:.80}, which is not supported"
                    f"{'' if is_other else ': this model has no such module'}; supported are "
                    f"{_allowed(linears)}"
                )
        found = [name for name in names if _ends_with(name, targets)]
    if not found:
        raise UnsupportedModel(
            f"target_modules {targets!r:.80} names no module of this model, which has "
            f"{_allowed(linears)}"
        )
    if excluded := config.get("exclude_modules"):
        out = (
            _matching("exclude_modules", excluded, found)
            if isinstance(excluded, str)
            else [name for name in found if _ends_with(name, excluded)]
        )
        found = [name for name in found if name not in out]
        if not found:
            raise UnsupportedModel(
                f"exclude_modules {excluded!r:.80} excludes every module that target_modules names"
            )
    if layers is not None and layers[0]:
        found = _in_layers(found, *layers)
    if others := [name for name in found if name not in linears]:
        raise UnsupportedModel(
            f"target_modules has {others[0]}, which is not supported; supported are "
            f"{_allowed(linears)}"
        )
    return found


def _layers(config: Mapping[str, Any]) -> tuple[Collection[int], list[str]] | None:
    """Returns the numbers in `layers_to_transform` and the names of module lists in
    `layers_pattern`. For example, the number 2 and the name "layers" limit the adapter to
    model.layers.2. Returns None if the config does not limit the layers."""
    given = config.get("layers_to_transform")
    patterns = config.get("layers_pattern") or []
    if given is None:
        return None
    layers = given if isinstance(given, list) else [given]
    if not all(type(layer) is int for layer in layers):
        raise UnsupportedModel(
            f"layers_to_transform is {given!r:.80}; it must be a layer number or a list of them"
        )
    return layers, patterns if isinstance(patterns, list) else [patterns]


def _in_layers(names: list[str], layers: Collection[int], lists: list[str]) -> list[str]:
    """Returns the module names whose layer number is in `layers`. In a module name, the layer
    number follows one of the names in `lists`: 2 follows "layers" in model.layers.2.mlp.up_proj.
    If `lists` is empty, the layer number is the first number. Raises UnsupportedModel if no module
    name is left."""
    patterns = [
        Pattern("layers_pattern", given, rf".*\.{given}\.(\d+)\.") for given in map(str, lists)
    ]
    if not patterns:
        numbers = [[found[1] if (found := _IN_A_LIST.match(name)) else None for name in names]]
    else:
        numbers = match_all(patterns, names)
    first = [next(filter(None, of_name), "") for of_name in zip(*numbers, strict=True)]
    if lists and not any(map(str.isdecimal, first)):
        raise UnsupportedModel(
            f'layers_pattern is {lists!r:.80}; it must be "layers", which is the name of '
            "this model's only list of layers"
        )
    chosen = [
        name
        for name, number in zip(names, first, strict=True)
        if number.isdecimal() and int(number) in layers
    ]
    if not chosen:
        existing = sorted(int(number) for number in first if number.isdecimal())
        where = f"from {existing[0]} to {existing[-1]}" if existing else "none"
        raise UnsupportedModel(
            f"layers_to_transform is {layers!r:.80}, but none of these layers has a module of "
            f"target_modules. Layers with such a module: {where}"
        )
    return chosen


def _matching(field: str, expression: str, names: Sequence[str]) -> list[str]:
    """Returns the names that an expression matches completely. Raises UnsupportedModel naming an
    invalid expression."""
    pattern = Pattern(field, expression, expression, is_whole=True)
    (found,) = match_all([pattern], names)
    return [name for name, match in zip(names, found, strict=True) if match is not None]


def _ends_with(name: str, targets: Collection[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _allowed(linears: Collection[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
