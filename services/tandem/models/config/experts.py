"""Reads the sizes and the routing of mixture-of-experts layers from config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.families import Family
from tandem.models.config.fields import flag, number, size


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of experts, all of the same size. The router first chooses the `top` best groups for a
    token, and then the token's experts from these groups."""

    num: int
    top: int  # number of groups chosen for each token


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer. A router chooses `top_k` experts for each token. The layer's output
    is the weighted sum of the outputs of these experts.

    The weights are computed from the router's logits: by softmax over all experts, by softmax over
    the chosen experts, or with `is_corrected` by sigmoid.
    """

    num: int
    top_k: int  # number of experts chosen for each token
    inner: int  # intermediate size of each expert
    is_normalized: bool  # True: weights are divided by their sum before `scale` is applied.
    has_biases: bool = False  # True: the router and all matrices of the experts have biases.
    is_corrected: bool = False  # True: experts are ranked by sigmoid(logit) plus a learned bias.
    groups: ExpertGroups | None = None
    scale: float = 1.0  # factor on the weights of the chosen experts
    shared_inner: int = 0  # sum of the intermediate sizes of all shared experts; 0: there are none
    # True: the output of the shared expert is multiplied by the sigmoid of a learned gate.
    has_shared_gate: bool = False


def read_experts(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> list[Experts | None]:
    """Returns one entry per layer: its experts, or None for a layer with a dense MLP.

    Raises UnsupportedModel naming the field that is not supported."""
    if not family.experts:
        return [None] * num_layers
    num = size(config, _num_experts_key(config, family))
    top_k = size(config, "num_experts_per_tok")
    if top_k > num:
        raise UnsupportedModel(
            f"num_experts_per_tok is {top_k}; it must be at most the number of experts, {num}"
        )
    if family.experts == "deepseek":
        return _deepseek_experts(config, family, num_layers, num, top_k)
    is_chosen = family.experts == "qwen"
    experts = Experts(
        num=num,
        top_k=top_k,
        inner=size(config, "moe_intermediate_size" if is_chosen else "intermediate_size"),
        is_normalized=not is_chosen or flag(config, "norm_topk_prob"),
        has_biases=family.experts == "gpt_oss",
        shared_inner=(
            size(config, "shared_expert_intermediate_size") if family.has_shared_gate else 0
        ),
        has_shared_gate=family.has_shared_gate,
    )
    if not is_chosen:
        return [experts] * num_layers
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, Sequence) or any(type(layer) is not int for layer in dense):
        raise UnsupportedModel(
            f"mlp_only_layers is {dense!r:.80}; it must be a list of layer numbers"
        )
    step = size(config, "decoder_sparse_step")
    return [
        experts if layer not in dense and (layer + 1) % step == 0 else None
        for layer in range(num_layers)
    ]


def _deepseek_experts(
    config: Mapping[str, Any], family: Family, num_layers: int, num: int, top_k: int
) -> list[Experts | None]:
    num_dense = config.get("first_k_dense_replace")
    if type(num_dense) is not int or num_dense < 0:
        raise UnsupportedModel(
            f"first_k_dense_replace is {num_dense!r:.80}; it must be an integer of at least 0"
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
    # Smallest allowed number of experts in a group. With `is_corrected` it is 2, because a group's
    # score is then the sum of the scores of the group's two best experts.
    least = 2 if family.is_corrected else 1
    if num % groups.num or num // groups.num < least or groups.top > groups.num:
        raise UnsupportedModel(
            f"n_group is {groups.num} and topk_group is {groups.top}; n_group must divide the "
            f"{num} experts into equal groups of at least {least} experts, and topk_group must not "
            "be above n_group"
        )
    if top_k > groups.top * (num // groups.num):
        raise UnsupportedModel(
            f"num_experts_per_tok is {top_k}; it must be at most "
            f"{groups.top * (num // groups.num)}, the number of experts in "
            f"{groups.top} groups (topk_group)"
        )
    return groups if groups.top < groups.num else None


def _num_experts_key(config: Mapping[str, Any], family: Family) -> str:
    if family.experts == "deepseek":
        return "n_routed_experts"
    return "num_experts" if "num_experts" in config else "num_local_experts"
