"""The properties of DeepSeek V4 that other families do not have, read from config.json.

- Attention has one KV head, whose keys are its values (`SharedKv`). RoPE rotates the last elements
  of queries and keys, two neighbours together, and rotates those of attention's output back.
- Some layers also attend to compressed entries (compressor.py), and have other frequencies.
- The residual stream is several streams, whose mixture is computed for each token (`Streams`,
  manifold-constrained hyper-connections).
- The first layers choose the experts of a token by a table (`Experts.has_table`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.compressor import Compressor
from tandem.models.config.fields import layer_number, number, one_per_layer, optional_number, size
from tandem.models.config.indexer import Indexer
from tandem.models.config.layers import LayerSpec
from tandem.models.config.rope import Rope, read_ropes

_WINDOW = "sliding_attention"
_CHOSEN = "compressed_sparse_attention"
_ALL = "heavily_compressed_attention"
_RATES = {_CHOSEN: 4, _ALL: 128}
# Key of `compress_ratios` -> the kind of the layer.
_KINDS = {0: _WINDOW, 4: _CHOSEN, 128: _ALL}
_TABLE = "hash_moe"
# Number of first layers that choose experts by a table, and part of a head that RoPE rotates, if
# config.json does not say so.
_NUM_TABLES = 3
_ROTARY_SHARE = 64 / 512


@dataclass(frozen=True, slots=True)
class SharedKv:
    """The sizes of attention with one KV head whose keys are its values."""

    q_rank: int  # size of the latent vector from which queries are computed
    rope_dim: int  # number of elements of a head that RoPE rotates; they come last
    # The heads are divided into groups. The outputs of a group's heads are projected to `out_rank`
    # elements, and then those of all groups to the hidden size.
    num_groups: int
    out_rank: int


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of the residual stream (arXiv:2512.24880)."""

    num: int
    # The matrix that mixes the streams is made doubly stochastic in so many iterations.
    num_iterations: int
    eps: float  # added to weights, and to the sums by which the matrix is divided


def with_plain_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with the RoPE parameters by layer kind: those of layers with a compressor
    are called full_attention. Raises UnsupportedModel."""
    plain = dict(config)
    given, old = config.get("rope_parameters") or {}, plain.pop("rope_scaling", None)
    if given and old:
        raise UnsupportedModel("rope_parameters and rope_scaling must not be set together")
    given = given or old or {}
    if not isinstance(given, dict):
        raise UnsupportedModel(f"rope_parameters is {given!r:.80}; it must be an object")
    share = optional_number(config, "partial_rotary_factor", _ROTARY_SHARE)
    if config.get("partial_rotary_factor") is None and "qk_rope_head_dim" in config:
        share = size(config, "qk_rope_head_dim") / size(config, "head_dim")
    main, compressed = given.get("main"), given.get("compress")
    if not (isinstance(main, dict) and isinstance(compressed, dict)):
        theta = number(config, "compress_rope_theta", 160000.0)
        own = {"rope_type" if key == "type" else key: each for key, each in given.items()}
        main = {"rope_theta": number(config, "rope_theta", 10000.0), "partial_rotary_factor": share}
        compressed = own | {"rope_theta": theta, "partial_rotary_factor": share}
        if compressed.get("rope_type") == "yarn":
            compressed.setdefault("attention_factor", 1.0)
    kinds = {_WINDOW: main, "full_attention": compressed}
    return plain | {
        "partial_rotary_factor": share,
        "rope_parameters": {
            kind: {"partial_rotary_factor": 1.0, **each} for kind, each in kinds.items()
        },
    }


def read_shared_kv(config: Mapping[str, Any], ropes: Sequence[Rope]) -> SharedKv:
    """Reads the sizes of attention. `ropes` are those of the layers. Raises UnsupportedModel naming
    the field that is not supported."""
    dim = size(config, "head_dim")
    heads, num_groups = size(config, "num_attention_heads"), size(config, "o_groups")
    rotated = {rope.rotary_dim(dim) for rope in ropes}
    if len(rotated) > 1 or min(rotated) < 2 or min(rotated) % 2:
        raise UnsupportedModel(
            f"rope_parameters rotate {' or '.join(map(str, sorted(rotated)))} of {dim} elements of "
            "a head; all layers must rotate the same even number"
        )
    if heads % num_groups:
        raise UnsupportedModel(
            f"o_groups is {num_groups}; it must divide num_attention_heads, {heads}"
        )
    return SharedKv(
        q_rank=size(config, "q_lora_rank"),
        rope_dim=rotated.pop(),
        num_groups=num_groups,
        out_rank=size(config, "o_lora_rank"),
    )


def read_streams(config: Mapping[str, Any]) -> Streams:
    return Streams(
        num=size(config, "hc_mult"),
        num_iterations=size(config, "hc_sinkhorn_iters"),
        eps=number(config, "hc_eps", 1e-6),
    )


def with_deepseek_v4_layers(
    layers: Sequence[LayerSpec], config: Mapping[str, Any]
) -> tuple[LayerSpec, ...]:
    """Returns the layers with their windows, compressors, RoPE parameters and tables of experts.
    Raises UnsupportedModel naming the field that is not supported."""
    num_layers = len(layers)
    ropes = read_ropes(config, default_theta=10000.0, by_kind=True)
    if ropes[_WINDOW].scaling is not None:
        raise UnsupportedModel(
            "rope_parameters.main has a scaling, which is not supported; only the positions of "
            "layers with a compressor may be scaled (rope_parameters.compress)"
        )
    kinds = _layer_kinds(config, num_layers)
    compressors = {kind: _compressor(config, kind, ropes["full_attention"]) for kind in set(kinds)}
    window = size(config, "sliding_window")
    made = []
    for layer, kind, has_table in zip(layers, kinds, _have_tables(config, num_layers), strict=True):
        assert layer.experts is not None
        experts = replace(layer.experts, has_table=has_table, is_corrected=not has_table)
        rope = ropes[_WINDOW if kind == _WINDOW else "full_attention"]
        made.append(
            replace(layer, rope=rope, window=window, experts=experts, compressor=compressors[kind])
        )
    return tuple(made)


def _layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds = config.get("layer_types")
    ratios = config.get("compress_ratios")
    if kinds is None and ratios is not None:
        ratios = one_per_layer(ratios, "compress_ratios", num_layers)
        if unknown := [each for each in ratios if type(each) is not int or each not in _KINDS]:
            raise UnsupportedModel(
                f"compress_ratios has {unknown[0]!r:.80}; supported are "
                f"{', '.join(map(str, _KINDS))}"
            )
        return [_KINDS[each] for each in ratios]
    if kinds is None:
        return [_CHOSEN if layer > 1 and layer % 2 else _ALL for layer in range(num_layers)]
    kinds = one_per_layer(kinds, "layer_types", num_layers)
    known = (_WINDOW, *_RATES)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise UnsupportedModel(
            f"layer_types has {unknown[0]!r:.80}, which is not supported for this architecture; "
            f"supported are {', '.join(known)}"
        )
    return list(kinds)


def _compressor(config: Mapping[str, Any], kind: str, rope: Rope) -> Compressor | None:
    if kind == _WINDOW:
        return None
    rates = config.get("compress_rates") or {}
    if not isinstance(rates, dict):
        raise UnsupportedModel(f"compress_rates is {rates!r:.80}; it must be an object")
    old_key = "compress_rate_csa" if kind == _CHOSEN else "compress_rate_hca"
    rates = _RATES | rates | ({kind: config[old_key]} if config.get(old_key) is not None else {})
    rate, dim = size(rates, kind), size(config, "head_dim")
    if kind == _ALL:
        return Compressor(rate, dim)
    indexer = Indexer(
        num_heads=size(config, "index_n_heads"),
        dim=size(config, "index_head_dim"),
        rope_dim=rope.rotary_dim(dim),
        has_pairs=True,
        top_k=size(config, "index_topk"),
    )
    if indexer.dim < indexer.rope_dim:
        raise UnsupportedModel(
            f"index_head_dim is {indexer.dim}; it must be at least {indexer.rope_dim}, the number "
            "of elements that RoPE rotates"
        )
    return Compressor(rate, dim, indexer)


def _have_tables(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Returns, for each layer, whether a table chooses its experts."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        num = layer_number({"num_hash_layers": _NUM_TABLES, **config}, "num_hash_layers")
        return [layer < num for layer in range(num_layers)]
    kinds = one_per_layer(kinds, "mlp_layer_types", num_layers)
    if unknown := [kind for kind in kinds if kind not in (_TABLE, "moe")]:
        raise UnsupportedModel(
            f"mlp_layer_types has {unknown[0]!r:.80}; supported are {_TABLE} and moe"
        )
    return [kind == _TABLE for kind in kinds]
