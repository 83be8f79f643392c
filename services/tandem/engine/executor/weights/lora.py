"""Reads the weights of a LoRA adapter and converts them to the form that the decoders use.

The decoders multiply matrices with the same input in one product, such as q, k and v in the product
qkv. So the adapter's A and B matrices are grouped by product. B is multiplied by the adapter's
scale in float32, and then rounded to the compute dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load

from tandem.engine.executor.weights.rotary_rows import (
    RotatedRows,
    joined_delta_rows,
    query_and_gate_rows,
    query_rows,
    rotary_rows,
    token_products,
)
from tandem.errors import AdapterUnavailable
from tandem.models.checkpoint.expert_names import shared_mlp
from tandem.models.config.latent import Latent
from tandem.models.config.layers import LayerSpec
from tandem.models.config.linear_attention import GatedDelta, KimiDelta
from tandem.models.config.model import ModelConfig
from tandem.models.files import naming
from tandem.models.lora.adapter import WEIGHTS_FILE, LoraFolder, open_lora
from tandem.models.lora.targets import has_fused_mlp, layer_shapes
from tandem_kernels.lora import LoraHeads, LoraPart

if TYPE_CHECKING:
    from tandem.common.adapter import Adapter

Parts = tuple[LoraPart, ...]
_PRODUCTS = (
    *("qkv", "q_out", "attention_out", "attention_gate", "gate_up", "down"),
    *("decay_out", "gate_out"),
)
_STATE_OUT = "linear_attn.out_proj"


class _Matrix(NamedTuple):
    """A matrix of a product of the decoder."""

    name: str  # without the prefix of the layer
    first: int = 0  # the first column of the product's output that the matrix computes
    # The rows of the matrix that belong to the product, in their order; None: all.
    rows: torch.Tensor | None = None
    # The product's inputs that come before and after those of the matrix.
    num_inputs_around: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """An adapter's matrices for one layer, with one field for each product. The field is empty or
    None if the adapter does not change the product."""

    qkv: Parts
    attention_out: Parts
    gate_up: Parts
    down: Parts
    attention_gate: Parts = ()
    # The second matrices of decays and of output gates, for Kimi Delta Attention only.
    decay_out: Parts = ()
    gate_out: Parts = ()
    # The fields from here on are for latent attention only.
    q_out: Parts = ()
    latent_keys: LoraHeads | None = None
    latent_values: LoraHeads | None = None


@dataclass(frozen=True, slots=True)
class LoraWeights:
    digest: str
    layers: tuple[LoraLayer, ...]


def load_lora(
    adapter: Adapter,
    config: ModelConfig,
    *,
    rank_max: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LoraWeights:
    """Reads the files of an adapter.

    Raises AdapterUnavailable if the files do not have the digest `adapter.digest`, and ConfigError
    if the files cannot be read or do not fit the model.
    """
    folder = open_lora(adapter.path, config, rank_max=rank_max)
    weights, digest = folder.read_weights()
    if digest != adapter.digest:
        raise AdapterUnavailable(
            f"the files of the adapter {adapter.name!r} in {folder.path} have changed: their "
            f"digest is {digest}, not {adapter.digest}; load the adapter again"
        )
    with naming(folder.path / WEIGHTS_FILE):
        stored = load(weights)
    return LoraWeights(digest, make_layers(folder, stored, config, dtype=dtype, device=device))


def make_layers(
    folder: LoraFolder,
    stored: dict[str, torch.Tensor],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[LoraLayer, ...]:
    """Converts an adapter's tensors to the compute dtype and moves them to the device."""
    rotated = _rotated_rows(config)

    def factors(name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns A [rank, in] and B [out, rank] for the matrix `name`. B is already multiplied by
        the adapter's scale. Returns None if the adapter does not change this matrix."""
        if (module := folder.modules.get(name)) is None:
            return None
        a, b = (stored[tensor] for tensor in folder.tensors[name])
        return a, b.to(torch.float32) * module.scale

    def on_device(factor: torch.Tensor) -> torch.Tensor:
        return factor.to(device=device, dtype=dtype).contiguous()

    def parts(layer: int, matrices: Sequence[_Matrix]) -> Parts:
        made = []
        for matrix in matrices:
            if (found := factors(f"model.layers.{layer}.{matrix.name}")) is None:
                continue
            a, b = found
            if matrix.rows is not None:
                b = b[matrix.rows]
            elif matrix.name in rotated and config.layers[layer].has_attention:
                b = rotated[matrix.name].in_halves(b)
            a = torch.nn.functional.pad(a, matrix.num_inputs_around)
            made.append(LoraPart(matrix.first, on_device(a), on_device(b)))
        return tuple(made)

    def lora_layer(layer: int) -> LoraLayer:
        matrices = _matrices(config, config.layers[layer])
        products: dict[str, Any] = {
            product: parts(layer, matrices.get(product, ())) for product in _PRODUCTS
        }
        found = factors(f"model.layers.{layer}.self_attn.kv_b_proj")
        if config.latent is None or found is None:
            return LoraLayer(**products)
        a, b = map(on_device, found)
        keys, values = _absorbed(a, b, config.latent)
        return LoraLayer(**products, latent_keys=keys, latent_values=values)

    return tuple(map(lora_layer, range(config.num_layers)))


def _absorbed(a: torch.Tensor, b: torch.Tensor, latent: Latent) -> tuple[LoraHeads, LoraHeads]:
    """Converts an adapter of the matrix kv_b_proj to two adapters: one for the queries and one for
    the attention outputs.

    kv_b_proj computes a head's keys and values from latents: it consists of a key matrix W_k and a
    value matrix W_v for each head. Latent attention computes no keys and values. Instead, it
    multiplies a head's query q by W_k^T, and the head's attention output c, which is a sum of
    latents, by W_v. The adapter adds B_k A to W_k, and B_v A to W_v. So the products become:

        query     (W_k + B_k A)^T q = W_k^T q + A^T (B_k^T q)     B_k^T is applied first, then A^T
        output    (W_v + B_v A) c   = W_v c + B_v (A c)           A is applied first, then B_v
    """
    of_heads = b.view(-1, latent.plain_dim + latent.value_dim, len(a))
    num_heads = len(of_heads)
    of_keys, of_values = torch.split(of_heads, [latent.plain_dim, latent.value_dim], 1)
    return (
        LoraHeads(
            of_keys.transpose(1, 2).contiguous(), a.t().contiguous().expand(num_heads, -1, -1)
        ),
        LoraHeads(a.expand(num_heads, -1, -1), of_values.contiguous()),
    )


def _matrices(config: ModelConfig, spec: LayerSpec) -> dict[str, list[_Matrix]]:
    """Returns the matrices of each product of a layer. The outputs of those of "qkv" and "gate_up"
    are side by side. In a layer with experts, "gate_up" and "down" belong to the shared MLP."""
    shapes = layer_shapes(config, spec)
    orders = rotary_rows(config, spec)
    products: dict[str, list[_Matrix]] = {"q_out": [_Matrix("self_attn.q_b_proj")]}
    if isinstance(spec.linear, KimiDelta):
        products["decay_out"] = [_Matrix("self_attn.f_b_proj")]
        products["gate_out"] = [_Matrix("self_attn.g_b_proj")]
    if config.has_attention_gates and spec.has_attention:
        orders["self_attn.q_proj"], of_gates = query_and_gate_rows(config, spec.rope)
        products["attention_gate"] = [_Matrix("self_attn.q_proj", rows=of_gates)]
    elif config.has_head_gates:
        products["attention_gate"] = [_Matrix("self_attn.g_proj")]
    if isinstance(spec.linear, GatedDelta):
        joined = (f"linear_attn.in_proj_{part}" for part in ("qkvz", "ba"))
        orders |= dict(zip(joined, joined_delta_rows(spec.linear), strict=True))

    def side_by_side(names: Sequence[str]) -> list[_Matrix]:
        found = []
        first = 0
        for name in names:
            rows = orders.get(name)
            found.append(_Matrix(name, first, rows))
            first += shapes[name][0] if rows is None else len(rows)
        return found

    products["qkv"] = side_by_side([*_attention_names(config, spec), *_state_names(spec)])
    o_proj = shapes.get("self_attn.o_proj", (0, 0))
    of_state = shapes.get(_STATE_OUT, (0, 0))
    products["attention_out"] = [
        _Matrix("self_attn.o_proj", num_inputs_around=(0, of_state[1])),
        _Matrix(_STATE_OUT, num_inputs_around=(o_proj[1], 0)),
    ]
    mlp = "mlp" if spec.experts is None else shared_mlp(spec.experts)
    parts = ("gate_up_proj",) if has_fused_mlp(config) else ("gate_proj", "up_proj")
    names = [f"{mlp}.{part}" for part in parts]
    products["gate_up"] = side_by_side([name for name in names if name in shapes])
    products["down"] = [_Matrix(f"{mlp}.down_proj")]
    return products


def _attention_names(config: ModelConfig, spec: LayerSpec) -> list[str]:
    """Returns the names of the matrices that are multiplied by the input of attention."""
    if not spec.has_attention:
        return []
    if config.latent is not None:
        return [f"self_attn.{name}" for name, _ in token_products(config.latent)]
    parts = ["qkv"] if config.has_fused_qkv else ["q", "k", "v"]
    return [f"self_attn.{part}_proj" for part in parts]


def _state_names(spec: LayerSpec) -> list[str]:
    """Returns the names of the first matrices of a layer with a state, in the order of their
    outputs (`LayerWeights.qkv`)."""
    if spec.linear is None:
        return []
    if isinstance(spec.linear, KimiDelta):
        return [f"self_attn.{part}_proj" for part in (*"qkvb", "f_a", "g_a")]
    parts = ["in_proj"]
    if isinstance(spec.linear, GatedDelta):
        parts = {
            "": [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")],
            "joined": ["in_proj_qkvz", "in_proj_ba"],
            "apart": [f"{part}_proj" for part in "qkvgba"],
        }[spec.linear.form]
    return [f"linear_attn.{part}" for part in parts]


def _rotated_rows(config: ModelConfig) -> dict[str, RotatedRows]:
    """Maps the name of each matrix of latent attention to the rows that are rotated. The result is
    empty for models without latent attention."""
    if config.latent is None:
        return {}
    products = [*token_products(config.latent), ("q_b_proj", query_rows(config.latent))]
    return {f"self_attn.{name}": rows for name, rows in products}
