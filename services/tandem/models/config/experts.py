"""Reads the sizes and the routing of mixture-of-experts layers from config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.families import LIKE_DEEPSEEK, Family
from tandem.models.config.fields import (
    flag,
    layer_number,
    one_per_layer,
    optional_number,
    same_size,
    size,
)


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
    the chosen experts, or with `has_sigmoids` or `has_roots` for each expert on its own.
    """

    num: int
    top_k: int  # number of experts chosen for each token
    inner: int  # intermediate size of each expert
    is_normalized: bool  # True: weights are divided by their sum before `scale` is applied.
    has_biases: bool = False  # True: the router and all matrices of the experts have biases.
    has_sigmoids: bool = False  # True: the score of an expert is sigmoid(logit), not a softmax.
    # True: the score of an expert is the square root of softplus(logit), not a softmax.
    has_roots: bool = False
    has_table: bool = False  # True: a table has the experts that are chosen for each token id.
    is_corrected: bool = False  # True: experts are ranked by their score plus a learned bias.
    # True: the weight of an expert multiplies the expert's input instead of its output.
    weighs_inputs: bool = False
    groups: ExpertGroups | None = None
    scale: float = 1.0  # factor on the weights of the chosen experts
    shared_inner: int = 0  # sum of the intermediate sizes of all shared experts; 0: there are none
    # True: the output of the shared expert is multiplied by the sigmoid of a learned gate.
    has_shared_gate: bool = False
    # True: the router, the shared MLP and the experts have norms of their own, and a learned factor
    # multiplies the weight of each expert (Gemma 4).
    has_own_norms: bool = False


def read_experts(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> list[Experts | None]:
    """Returns one entry per layer: its experts, or None for a layer with a dense MLP.

    Raises UnsupportedModel naming the field that is not supported."""
    is_off = family.expert_layers == "switched" and not flag(config, "enable_moe_block")
    if not family.experts or is_off or not has_experts(config, family):
        return [None] * num_layers
    num = same_size(config, _num_experts_key(config, family))
    top_k = same_size(config, "num_experts_per_tok")
    if top_k > num:
        raise UnsupportedModel(
            f"num_experts_per_tok is {top_k}; it must be at most the number of experts, {num}"
        )
    is_deepseek = family.experts in LIKE_DEEPSEEK
    has_own_size = family.experts in ("qwen", "llama4", *LIKE_DEEPSEEK)
    inner = size(config, "moe_intermediate_size" if has_own_size else "intermediate_size")
    has_shared = "n_shared_experts" in family.defaults
    shared_inner = inner * size(config, "n_shared_experts") if has_shared else 0
    if family.experts == "nemotron":
        shared_inner = size(config, "moe_shared_expert_intermediate_size")
    if family.has_shared_gate:
        shared_inner = size(config, "shared_expert_intermediate_size")
    if "shared_intermediate_size" in family.defaults:
        shared_inner = size(config, "shared_intermediate_size")
    has_scale = "routed_scaling_factor" in family.defaults or is_deepseek
    experts = Experts(
        num=num,
        top_k=top_k,
        inner=inner,
        is_normalized=not has_own_size or flag(config, "norm_topk_prob"),
        has_biases=family.experts == "gpt_oss",
        has_sigmoids=family.has_sigmoids,
        has_roots=family.has_deepseek_v4_layers,
        is_corrected=family.is_corrected,
        weighs_inputs=family.weighs_inputs,
        groups=_groups(config, family, num, top_k) if is_deepseek else None,
        scale=optional_number(config, "routed_scaling_factor", 1.0) if has_scale else 1.0,
        shared_inner=shared_inner,
        has_shared_gate=family.has_shared_gate,
        has_own_norms=family.has_gemma4_layers,
    )
    return [experts if is_sparse else None for is_sparse in _are_sparse(config, family, num_layers)]


def has_experts(config: Mapping[str, Any], family: Family) -> bool:
    """Returns False if the number of experts is 0, with which models of Granite 4 have dense
    MLPs."""
    return family.experts != "granite" or config.get("num_local_experts") != 0


def _are_sparse(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Returns, for each layer, whether it has experts."""
    if family.expert_layers == "kinds":
        of_layers = one_per_layer(config.get("layer_types"), "layer_types", num_layers)
        return [kind == "moe" for kind in of_layers]
    if family.expert_layers in ("all", "switched"):
        return [True] * num_layers
    if family.expert_layers == "steps":
        dense = config.get("mlp_only_layers") or ()
        if not isinstance(dense, Sequence) or any(type(layer) is not int for layer in dense):
            raise UnsupportedModel(
                f"mlp_only_layers is {dense!r:.80}; it must be a list of layer numbers"
            )
        step = size(config, "decoder_sparse_step")
        return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    if family.expert_layers == "listed":
        listed = config.get("moe_layers")
        if listed is None:
            step = size(config, "interleave_moe_layer_step")
            return [(layer + 1) % step == 0 for layer in range(num_layers)]
        if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
            raise UnsupportedModel(
                f"moe_layers is {listed!r:.80}; it must be a list of layer numbers"
            )
        return [layer in listed for layer in range(num_layers)]
    if family.expert_layers == "range":
        step = size(config, "moe_layer_interval")
        first = layer_number(config, "moe_layer_start_index")
        last = config.get("moe_layer_end_index", -1)
        last = num_layers - 1 if last == -1 else layer_number(config, "moe_layer_end_index")
        return [(layer + 1) % step == 0 and first <= layer <= last for layer in range(num_layers)]
    if family.expert_layers == "types" and (kinds := config.get("mlp_layer_types")) is not None:
        kinds = one_per_layer(kinds, "mlp_layer_types", num_layers)
        if any(kind not in ("dense", "sparse") for kind in kinds):
            raise UnsupportedModel(
                f"mlp_layer_types is {kinds!r:.80}; it must have dense or sparse for each layer"
            )
        return [kind == "sparse" for kind in kinds]
    sparse = config.get("moe_layer_freq")
    if family.indexer == "blocks" and sparse is not None:
        return [bool(each) for each in one_per_layer(sparse, "moe_layer_freq", num_layers)]
    num_dense = layer_number(config, "first_k_dense_replace")
    return [layer >= num_dense for layer in range(num_layers)]


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
    if family.experts in ("llama4", *LIKE_DEEPSEEK):
        return "n_routed_experts"
    return "num_experts" if "num_experts" in config else "num_local_experts"
