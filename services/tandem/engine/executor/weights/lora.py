"""Reads the weights of a LoRA adapter and converts them to the form that the decoders use.

The decoders multiply matrices with the same input in one product, such as q, k and v in the product
qkv. So the adapter's A and B matrices are grouped by product. B is multiplied by the adapter's
scale in float32, and then rounded to the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load

from tandem.engine.executor.weights.rotary_rows import (
    RotatedRows,
    query_rows,
    rotary_rows,
    token_products,
)
from tandem.errors import AdapterUnavailable
from tandem.models.config.latent import Latent
from tandem.models.config.model import ModelConfig
from tandem.models.files import naming
from tandem.models.lora.adapter import WEIGHTS_FILE, LoraFolder, open_lora
from tandem.models.lora.targets import SHARED_MLP, linear_shapes
from tandem_kernels.lora import LoraHeads, LoraPart

if TYPE_CHECKING:
    from tandem.common.adapter import Adapter

Parts = tuple[LoraPart, ...]
# Product of a decoder -> the names of its matrices. The outputs of the matrices are side by side in
# the output of the product. `_FUSED_QKV` and `_FUSED_MLP` have the names for models that store the
# matrices of a product as one matrix. In a layer with experts, the matrices of "gate_up" and "down"
# are those of the shared MLP.
_PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_out": ("self_attn.q_b_proj",),
    "attention_out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_FUSED_QKV = {"qkv": ("self_attn.qkv_proj",)}
_FUSED_MLP = {"gate_up": ("mlp.gate_up_proj",)}


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """An adapter's matrices for one layer, with one field for each product. The field is empty or
    None if the adapter does not change the product."""

    qkv: Parts
    attention_out: Parts
    gate_up: Parts
    down: Parts
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
    names = _names(config)
    widths = _widths(config)
    orders = [rotary_rows(config, spec) for spec in config.layers]
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

    def parts(layer: int, product: str) -> Parts:
        made = []
        first = 0
        for short in names[product]:
            if config.layers[layer].experts is not None:
                short = short.replace("mlp.", SHARED_MLP)
            if (found := factors(f"model.layers.{layer}.{short}")) is not None:
                a, b = found
                if (order := orders[layer].get(short)) is not None:
                    b = b[order]
                elif short in rotated:
                    b = rotated[short].in_halves(b)
                made.append(LoraPart(first, on_device(a), on_device(b)))
            first += widths.get(short, 0)
        return tuple(made)

    def lora_layer(layer: int) -> LoraLayer:
        products: dict[str, Any] = {product: parts(layer, product) for product in _PRODUCTS}
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


def _names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Returns `_PRODUCTS` for this model: name of a product of the decoder, such as "qkv" -> names
    of the matrices with which the product multiplies."""
    if config.latent is not None:
        products = token_products(config.latent)
        return _PRODUCTS | {"qkv": tuple(f"self_attn.{name}" for name, _ in products)}
    fused = _FUSED_QKV if config.has_fused_qkv else {}
    return _PRODUCTS | fused | (_FUSED_MLP if config.has_fused_mlp else {})


def _rotated_rows(config: ModelConfig) -> dict[str, RotatedRows]:
    """Maps the name of each matrix of latent attention to the rows that are rotated. The result is
    empty for models without latent attention."""
    if config.latent is None:
        return {}
    products = [*token_products(config.latent), ("q_b_proj", query_rows(config.latent))]
    return {f"self_attn.{name}": rows for name, rows in products}


def _widths(config: ModelConfig) -> dict[str, int]:
    """Returns the number of outputs of each matrix that an adapter may change. The keys are names
    without the prefix of the layer, such as "self_attn.q_proj"."""
    return {name.split(".", 3)[3]: num_out for name, (num_out, _) in linear_shapes(config).items()}
