"""The indexer of sparse attention, read from config.json.

In a layer with sparse attention, a query attends only to some of the earlier tokens. The indexer
chooses them. It has heads of its own: a key k for each token, which is kept as a part of the
token's KV, and several queries q and weights w for each query of attention. The score of the token
at position s for the query at position t is

    score(t, s) = sum over heads h of w[t, h] * relu(q[t, h] . k[s] / sqrt(dim))

The query attends to the `top_k` tokens with the highest scores. Of tokens with equal scores, those
at lower positions are chosen (DeepSeek V3.2, arXiv:2512.02556). A layer without an indexer of its
own may use the choice of an earlier layer (GLM 5, arXiv:2603.12201).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.families import Family
from tandem.models.config.fields import layer_number, one_per_layer, optional_size, size

LAYER_TYPE = "indexed_attention"  # name in `layer_types` of layers whose tokens are chosen
_KINDS = ("full", "shared")
_LETTERS = {"F": "full", "S": "shared"}


@dataclass(frozen=True, slots=True)
class Indexer:
    """The sizes of a layer's indexer."""

    num_heads: int
    dim: int  # number of elements of a head's query, and of a token's key
    rope_dim: int  # number of elements that RoPE rotates; they come first
    # True: checkpoints store two elements that RoPE rotates together side by side.
    has_pairs: bool
    top_k: int  # number of tokens to which a query attends


def read_indexers(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> list[Indexer | None]:
    """Returns the indexer of each layer; None for a layer without one. In families with indexers,
    such a layer uses the choice of the last layer before it that has one. Raises UnsupportedModel
    naming the field that is not supported."""
    if not family.indexer:
        return [None] * num_layers
    _check_layer_types(config, num_layers)
    if config.get("q_lora_rank") is None:
        raise UnsupportedModel(
            "q_lora_rank is null; the indexer of sparse attention needs a latent of the queries"
        )
    rope_dim, dim = size(config, "qk_rope_head_dim"), size(config, "index_head_dim")
    if rope_dim > dim:
        raise UnsupportedModel(
            f"index_head_dim is {dim}; it must be at least qk_rope_head_dim, {rope_dim}"
        )
    indexer = Indexer(
        num_heads=size(config, "index_n_heads"),
        dim=dim,
        rope_dim=rope_dim,
        has_pairs=family.indexer == "shared",
        top_k=size(config, "index_topk"),
    )
    if family.indexer == "own":
        return [indexer] * num_layers
    kinds = _kinds(config, num_layers)
    if kinds[0] != "full":
        raise UnsupportedModel(
            "indexer_types gives the first layer no indexer of its own (shared); it must be full"
        )
    return [indexer if kind == "full" else None for kind in kinds]


def _check_layer_types(config: Mapping[str, Any], num_layers: int) -> None:
    kinds = config.get("layer_types")
    if kinds is None:
        return
    kinds = one_per_layer(kinds, "layer_types", num_layers)
    if unknown := [kind for kind in kinds if kind != LAYER_TYPE]:
        raise UnsupportedModel(
            f"layer_types has {unknown[0]!r:.80}, which is not supported for this architecture; "
            f"all layers must be {LAYER_TYPE}"
        )


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Returns, for each layer, whether it has an indexer of its own ("full") or uses an earlier
    layer's choice ("shared")."""
    for key in ("indexer_types", "index_topk_pattern"):
        given = config.get(key)
        if given is None:
            continue
        if isinstance(given, str):
            given = [_LETTERS.get(letter, letter) for letter in given]
        kinds = list(one_per_layer(given, key, num_layers))
        if unknown := [kind for kind in kinds if kind not in _KINDS]:
            raise UnsupportedModel(
                f"{key} has {unknown[0]!r:.80}, which is not supported; supported are full and "
                "shared"
            )
        return kinds
    every = optional_size(config, "index_topk_freq", 1)
    offset = layer_number({"index_skip_topk_offset": 2, **config}, "index_skip_topk_offset")
    return [
        "shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(num_layers)
    ]
