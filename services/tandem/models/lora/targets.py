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
from tandem.models.checkpoint.expert_names import shared_mlp
from tandem.models.checkpoint.weight_shapes import state_shapes
from tandem.models.config.layers import LayerSpec
from tandem.models.config.linear_attention import KimiDelta
from tandem.models.config.model import ModelConfig
from tandem.models.limits import why_irregular
from tandem.models.lora.patterns import Pattern, match_all

_IN_A_LIST = re.compile(r".*\.[^.]*\.(\d+)\.")
ALL_LINEAR = "all-linear"
# Modules that PEFT can adapt and Tandem cannot.
_OTHERS = ("lm_head", "model.embed_tokens", "model.norm")


def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the shape (outputs, inputs) of each matrix that an adapter may change, by the name
    that it has in this package."""
    return {
        f"model.layers.{layer}.{name}": shape
        for layer, spec in enumerate(model.layers)
        for name, shape in layer_shapes(model, spec).items()
    }


def layer_shapes(model: ModelConfig, spec: LayerSpec) -> dict[str, tuple[int, int]]:
    """Returns the same for one layer. Names are without the layer's prefix."""
    attention = _attention_shapes(model) if spec.has_attention else {}
    return attention | _state_shapes(model, spec) | _mlp_shapes(model, spec)


def checkpoint_name(model: ModelConfig, name: str) -> str:
    """Returns the name that a module of the model has in checkpoints, and in adapters."""
    return model.name_in_files(f"{name}.weight").removesuffix(".weight")


def _state_shapes(model: ModelConfig, spec: LayerSpec) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the matrices of a layer's state, whose convolution adapters cannot
    change."""
    if spec.linear is None:
        return {}
    shapes = state_shapes(spec.linear, model.hidden_size, "", ())
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if len(shape) == 2
    }


def _mlp_shapes(model: ModelConfig, spec: LayerSpec) -> dict[str, tuple[int, int]]:
    """Returns the shapes of a layer's MLP, or of its shared experts in a layer with experts."""
    hidden = model.hidden_size
    inner = spec.inner or model.intermediate_size
    place = "mlp"
    if spec.experts is not None:
        inner = spec.experts.shared_inner
        place = shared_mlp(spec.experts)
    if not spec.has_mlp or not inner:
        return {}
    shapes = {f"{place}.down_proj": (hidden, inner)}
    if has_fused_mlp(model):
        return shapes | {f"{place}.gate_up_proj": (2 * inner, hidden)}
    names = ("gate_proj", "up_proj") if model.has_gates else ("up_proj",)
    return shapes | {f"{place}.{name}": (inner, hidden) for name in names}


def has_fused_mlp(model: ModelConfig) -> bool:
    """Returns whether adapters have one matrix for gate and up."""
    return model.has_fused_mlp or model.may_fuse_mlp


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
    if model.has_head_gates:
        per_token["self_attn.g_proj"] = (num_heads, hidden)
    # With gates, each head has its query and then its gate.
    num_queries = 2 * q_size if model.has_attention_gates else q_size
    return out | per_token | {"self_attn.q_proj": (num_queries, hidden)}


def find_modules(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Returns the names of the matrices that an adapter_config.json targets, as in this package.
    Raises UnsupportedModel naming a target that the model does not have or that is not
    supported."""
    if why := why_irregular(model):
        raise UnsupportedModel(f"adapters are not supported for this model: {why}")
    linears = linear_shapes(model)
    others = [*_OTHERS, *_convolutions(model)]
    # Names that an adapter may use, and the names in this package.
    own_names = {checkpoint_name(model, name): name for name in (*linears, *others)}
    allowed = _allowed([given for given, name in own_names.items() if name in linears])
    own_names |= {name: name for name in (*linears, *others)}

    def ending(targets: Collection[str]) -> list[str]:
        ends = [own for given, own in own_names.items() if _ends_with(given, targets)]
        return [name for name in (*linears, *others) if name in set(ends)]

    def matching(field: str, expression: str) -> list[str]:
        matches = {own_names[name] for name in _matching(field, expression, list(own_names))}
        return [name for name in (*linears, *others) if name in matches]

    targets = config.get("target_modules")
    layers = _layers(config)
    if not targets or not isinstance(targets, str | list):
        raise UnsupportedModel(
            f"target_modules is {targets!r:.80}; it must name modules: {allowed}"
        )
    if targets == ALL_LINEAR:
        found = list(linears)
    elif isinstance(targets, str):
        found = matching("target_modules", targets)
    else:
        for target in targets:
            named = ending([target])
            if not any(name in linears for name in named):
                raise UnsupportedModel(
                    f"target_modules has {target!r:.80}, which is not supported"
                    f"{'' if named else ': this model has no such module'}; supported are {allowed}"
                )
        found = ending(targets)
    if not found:
        raise UnsupportedModel(
            f"target_modules {targets!r:.80} names no module of this model, which has {allowed}"
        )
    if excluded := config.get("exclude_modules"):
        out = set(
            matching("exclude_modules", excluded) if isinstance(excluded, str) else ending(excluded)
        )
        found = [name for name in found if name not in out]
        if not found:
            raise UnsupportedModel(
                f"exclude_modules {excluded!r:.80} excludes every module that target_modules names"
            )
    if layers is not None and layers[0]:
        found = _in_layers(found, *layers)
    if unsupported := [name for name in found if name not in linears]:
        raise UnsupportedModel(
            f"target_modules has {checkpoint_name(model, unsupported[0])}, which is not supported; "
            f"supported are {allowed}"
        )
    return found


def _convolutions(model: ModelConfig) -> list[str]:
    return [
        f"model.layers.{layer}.{name}"
        for layer, spec in enumerate(model.layers)
        if spec.linear is not None
        for name in (
            [f"self_attn.{part}_conv1d" for part in "qkv"]
            if isinstance(spec.linear, KimiDelta)
            else ["linear_attn.conv1d"]
        )
    ]


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
