"""The properties of Gemma 3n that other families do not have, read from config.json.

- AltUp (https://arxiv.org/abs/2301.13310): the residual stream has several copies. A layer predicts
  all copies, computes one of them, the *active* one, and corrects the others by the difference from
  its prediction.
- LAuReL (https://arxiv.org/abs/2411.07501): a product of two narrow matrices beside attention.
- The gates of some layers are sparse: those below a cutoff, which follows from the mean and the
  deviation of the row, become 0 before the activation.
- The last layers read the KV of earlier ones, and tokens have embeddings for each layer, as in
  Gemma 4 (gemma4.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.fields import flag, layer_number, one_per_layer, size
from tandem.models.config.gemma4 import kv_sources
from tandem.models.config.layers import LayerSpec

# transformers' default of `activation_sparsity_pattern`: a model with more layers than this has
# sparse gates in this number of first layers.
_DEFAULT_SPARSE_LAYERS = 10
_DEFAULT_SPARSITY = 0.95


@dataclass(frozen=True, slots=True)
class AltUp:
    """The copies of the residual stream, and the sizes of LAuReL."""

    num: int  # number of copies
    active: int  # number of the copy that layers compute
    # True: a learned factor multiplies the active copy that selects a token's embedding for a layer
    scales_output: bool
    laurel_rank: int


def read_alt_up(config: Mapping[str, Any]) -> AltUp:
    """Raises UnsupportedModel naming the field that is not supported."""
    num, active = size(config, "altup_num_inputs"), layer_number(config, "altup_active_idx")
    if active >= num:
        raise UnsupportedModel(
            f"altup_active_idx is {active}; it must be less than altup_num_inputs, {num}"
        )
    return AltUp(
        num, active, flag(config, "altup_correct_scale", True), size(config, "laurel_rank")
    )


def with_gemma3n_layers(
    layers: Sequence[LayerSpec], config: Mapping[str, Any]
) -> tuple[LayerSpec, ...]:
    """Returns the layers with shared KV, MLP sizes and sparse gates. Raises UnsupportedModel."""
    sizes = config.get("intermediate_size")
    if not isinstance(sizes, list):
        sizes = [sizes] * len(layers)
    sizes = [
        size({"intermediate_size": each}, "intermediate_size")
        for each in one_per_layer(sizes, "intermediate_size", len(layers))
    ]
    return tuple(
        replace(layer, kv_source=source, inner=inner, sparsity=sparsity)
        for layer, source, inner, sparsity in zip(
            layers,
            kv_sources(layers, config, pattern=5),
            sizes,
            _sparsities(config, len(layers)),
            strict=True,
        )
    )


def largest_inner(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field `intermediate_size` as one number, the largest of all layers."""
    sizes = config.get("intermediate_size")
    if not isinstance(sizes, list) or not all(type(each) is int for each in sizes):
        return {}
    return {"intermediate_size": max(sizes, default=0)}


def _sparsities(config: Mapping[str, Any], num_layers: int) -> Sequence[float]:
    """Returns the fraction of a layer's gates that become 0 if they are normally distributed."""
    given = config.get("activation_sparsity_pattern")
    if given is None:
        num = _DEFAULT_SPARSE_LAYERS if num_layers > _DEFAULT_SPARSE_LAYERS else 0
        return [_DEFAULT_SPARSITY] * num + [0.0] * (num_layers - num)
    given = one_per_layer(given, "activation_sparsity_pattern", num_layers)
    if any(type(each) not in (int, float) or not 0 <= each < 1 for each in given):
        raise UnsupportedModel(
            f"activation_sparsity_pattern is {given!r:.80}; it must have a number of at least 0 "
            "and below 1 for each layer"
        )
    return [float(each) for each in given]
