"""Experts in the place of a layer's MLP, as a config.json says them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.families import Family
from tandem.models.config.fields import flag, number, size


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of equally many experts: those of a token are of the groups that it ranks first."""

    num: int
    top: int  # groups of a token


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of which a router chooses a few for each token, and adds what they give, weighted.

    The weights are the softmax of the router's logits, over all experts or over the chosen ones.
    With a correction they are the logits' sigmoids: those of a token may be divided by their sum.
    """

    num: int
    top_k: int  # experts of a token
    inner: int  # the intermediate size of each
    is_normalized: bool  # a token's weights sum to 1, before `scale`
    has_biases: bool = False  # the router's and all products' of the experts
    is_corrected: bool = False  # experts are ranked by sigmoids plus learned numbers
    groups: ExpertGroups | None = None
    scale: float = 1.0  # of weights
    shared_inner: int = 0  # the intermediate size of an MLP beside them for all tokens; 0: none


def read_experts(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> list[Experts | None]:
    """Returns each layer's experts; None for a layer with a dense MLP.

    Raises UnsupportedModel naming what cannot be run."""
    if not family.experts:
        return [None] * num_layers
    num, top_k = size(config, _name_of_num(config, family)), size(config, "num_experts_per_tok")
    if top_k > num:
        raise UnsupportedModel(f"num_experts_per_tok is {top_k}; there are {num} experts")
    if family.experts == "deepseek":
        return _of_deepseek(config, family, num_layers, num, top_k)
    is_chosen = family.experts == "qwen"
    experts = Experts(
        num=num,
        top_k=top_k,
        inner=size(config, "moe_intermediate_size" if is_chosen else "intermediate_size"),
        is_normalized=not is_chosen or flag(config, "norm_topk_prob"),
        has_biases=family.experts == "gpt_oss",
    )
    if not is_chosen:
        return [experts] * num_layers
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, Sequence) or any(type(layer) is not int for layer in dense):
        raise UnsupportedModel(f"mlp_only_layers is {dense!r:.80}; it must be a list of layers")
    step = size(config, "decoder_sparse_step")
    return [
        experts if layer not in dense and (layer + 1) % step == 0 else None
        for layer in range(num_layers)
    ]


def _of_deepseek(
    config: Mapping[str, Any], family: Family, num_layers: int, num: int, top_k: int
) -> list[Experts | None]:
    num_dense = config.get("first_k_dense_replace")
    if type(num_dense) is not int or num_dense < 0:
        raise UnsupportedModel(
            f"first_k_dense_replace is {num_dense!r:.80}; it must be a number of layers"
        )
    inner = size(config, "moe_intermediate_size")
    experts = Experts(
        num=num,
        top_k=top_k,
        inner=inner,
        is_normalized=family.is_corrected and flag(config, "norm_topk_prob"),
        is_corrected=family.is_corrected,
        groups=_groups(config, family, num, top_k),
        scale=number(config, "routed_scaling_factor", 1.0),
        shared_inner=inner * size(config, "n_shared_experts"),
    )
    return [experts if layer >= num_dense else None for layer in range(num_layers)]


def _groups(config: Mapping[str, Any], family: Family, num: int, top_k: int) -> ExpertGroups | None:
    if not family.is_corrected and config.get("topk_method") == "greedy":
        return None
    groups = ExpertGroups(size(config, "n_group"), size(config, "topk_group"))
    # A corrected router ranks a group by two of its experts.
    least = 2 if family.is_corrected else 1
    if num % groups.num or num // groups.num < least or groups.top > groups.num:
        raise UnsupportedModel(
            f"n_group is {groups.num} and topk_group {groups.top}; {num} experts must divide into "
            f"so many groups of at least {least}"
        )
    if top_k > groups.top * (num // groups.num):
        raise UnsupportedModel(
            f"num_experts_per_tok is {top_k}; {groups.top} groups of topk_group have "
            f"{groups.top * (num // groups.num)} experts"
        )
    return groups if groups.top < groups.num else None


def _name_of_num(config: Mapping[str, Any], family: Family) -> str:
    if family.experts == "deepseek":
        return "n_routed_experts"
    return "num_experts" if "num_experts" in config else "num_local_experts"
