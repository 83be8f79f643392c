"""Experts in the place of a layer's MLP, as a config.json says them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.families import Family


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of which a router chooses a few for each token, and adds what they give, weighted.

    The weights are the softmax of the router's logits, over all experts or over the chosen ones.
    """

    num: int
    top_k: int  # experts of a token
    inner: int  # the intermediate size of each
    is_normalized: bool  # a token's weights sum to 1
    has_biases: bool = False  # the router's and all products' of the experts


def read_experts(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> list[Experts | None]:
    """Returns each layer's experts; None for a layer with a dense MLP.

    Raises UnsupportedModel naming what cannot be run."""
    if not family.experts:
        return [None] * num_layers
    num = _size(config, "num_experts" if "num_experts" in config else "num_local_experts")
    top_k = _size(config, "num_experts_per_tok")
    if top_k > num:
        raise UnsupportedModel(f"num_experts_per_tok is {top_k}; there are {num} experts")
    is_chosen = family.experts == "qwen"
    experts = Experts(
        num=num,
        top_k=top_k,
        inner=_size(config, "moe_intermediate_size" if is_chosen else "intermediate_size"),
        is_normalized=not is_chosen or bool(config.get("norm_topk_prob")),
        has_biases=family.experts == "gpt_oss",
    )
    if not is_chosen:
        return [experts] * num_layers
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, Sequence) or any(type(layer) is not int for layer in dense):
        raise UnsupportedModel(f"mlp_only_layers is {dense!r:.80}; it must be a list of layers")
    step = _size(config, "decoder_sparse_step")
    return [
        experts if layer not in dense and (layer + 1) % step == 0 else None
        for layer in range(num_layers)
    ]


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UnsupportedModel(f"{name} is {value!r:.80}; it must be a positive integer")
    return value
