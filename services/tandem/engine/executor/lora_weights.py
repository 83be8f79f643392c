"""A LoRA adapter's weights as the decoders read them, by the products that they change.

Scales are multiplied into B in float32, before it is rounded to the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load

from tandem.engine.executor.latent_weights import RotatedRows, token_products
from tandem.engine.executor.weight_shapes import rotary_rows
from tandem.errors import AdapterUnavailable
from tandem.models.broken_files import naming
from tandem.models.config import ModelConfig
from tandem.models.lora import WEIGHTS_FILE, LoraFolder, open_lora
from tandem.models.lora_targets import linear_shapes
from tandem_kernels.lora import LoraPart

if TYPE_CHECKING:
    from tandem.adapter import Adapter

Parts = tuple[LoraPart, ...]
# The matrices of each product, side by side; of a fused one the first name alone.
_PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_FUSED = {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """The parts of an adapter in the products of one layer; empty where it adds nothing."""

    qkv: Parts
    attention_out: Parts
    gate_up: Parts
    down: Parts


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
    """Reads an adapter whose files are those of its digest.

    Raises AdapterUnavailable where they are not, and ConfigError for a folder that cannot be read
    or used.
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
    """Brings an adapter's tensors into the compute dtype and onto the device."""
    names = _names(config)
    widths = _widths(config)
    order, rotated = rotary_rows(config), _rotated_rows(config)

    def parts(layer: int, product: str) -> Parts:
        made, first = [], 0
        for short in names[product]:
            name = f"model.layers.{layer}.{short}"
            if (module := folder.modules.get(name)) is not None:
                a, b = (stored[tensor] for tensor in folder.tensors[name])
                scaled = b.to(torch.float32) * module.scale
                if product == "qkv" and order is not None:  # of a fused matrix
                    scaled = scaled[order]
                elif short in rotated:
                    scaled = rotated[short].in_halves(scaled)
                made.append(
                    LoraPart(
                        first,
                        a.to(device=device, dtype=dtype).contiguous(),
                        scaled.to(device=device, dtype=dtype).contiguous(),
                    )
                )
            first += widths.get(short, 0)
        return tuple(made)

    return tuple(
        LoraLayer(**{product: parts(layer, product) for product in _PRODUCTS})
        for layer in range(config.num_layers)
    )


def _names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Returns the matrices of each product, side by side."""
    if config.latent is not None:
        return _PRODUCTS | {"qkv": tuple(_rotated_rows(config))}
    return _PRODUCTS | (_FUSED if config.is_fused else {})


def _rotated_rows(config: ModelConfig) -> dict[str, RotatedRows]:
    """Returns how decoders order the rows of a latent attention's matrices; else nothing."""
    products = [] if config.latent is None else token_products(config.latent)
    return {f"self_attn.{name}": rows for name, rows in products}


def _widths(config: ModelConfig) -> dict[str, int]:
    """Returns the outputs of each matrix."""
    return {name.split(".", 3)[3]: num_out for name, (num_out, _) in linear_shapes(config).items()}
