"""Quantization of the keys in an int4 pool. A channel is one of the D elements of a head. Each
channel has a static scale for all tokens, and each token has its own scale.

The channels are reordered, so that those that matter most for scores are the first quarter
(`KeyChannels`). The first quarter is stored with 6 bits per number, the other channels with 4:

    y        x / channel scale, fp32, in the order of the channels
    scale    the token's scale, computed from all y as in kv_int4.py
    number   first quarter: 4 * y / scale, rounded to the nearest integer (ties to even), within
             -32 to 31; other channels: y / scale, within -8 to 7
    x        is dequantized as number * (scale * multiplier); the multiplier is the channel's scale,
             divided by 4 in the first quarter

A row of D channels, where D is a multiple of 16, is stored in two parts:

- D / 2 bytes: the upper 4 bits of each number in the first quarter, and the other numbers, laid out
  as in kv_int4.py.
- D / 16 bytes: the lower 2 bits of the numbers in the first quarter. Those of channel i start at
  bit 2 * (i // (D / 16)) of byte i % (D / 16).

`quantize_key` in native/kv_int4.h computes the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch

from tandem_kernels.kv_int4 import scales_of


@dataclass(frozen=True)
class KeyChannels:
    """The order and the static scales of the key channels of a model. Both tensors are [layers, KV
    heads, D]."""

    order: torch.Tensor  # int32: order[..., i] is the channel that is stored at position i
    scales: torch.Tensor  # float32: scales[..., i] is the scale of this channel

    @cached_property
    def multipliers(self) -> torch.Tensor:
        """The `multiplier` in the formula of this module's docstring, for each position of the
        stored row, float32 [layers, KV heads, D]."""
        fine = self.scales.clone()
        fine[..., : self.scales.shape[-1] // 4] /= 4
        return fine

    @property
    def digest(self) -> str:
        """Hash of the order and the scales, 8 hex digits. Blocks can be exchanged only between
        pools with equal digests."""
        digest = hashlib.blake2b(digest_size=4)
        for tensor in (self.order, self.scales):
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def of_layers(self, layers: list[int], device: torch.device) -> KeyChannels:
        """Returns the order and scales of only these layers, moved to a device."""
        return KeyChannels(
            self.order[layers].contiguous().to(device), self.scales[layers].contiguous().to(device)
        )

    def of_heads(self, heads: range) -> KeyChannels:
        """Returns the order and scales of only these consecutive heads."""
        own = slice(heads.start, heads.stop)
        return KeyChannels(self.order[:, own], self.scales[:, own])


def quantize(
    rows: torch.Tensor, order: torch.Tensor, channel_scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows [T, heads, D] to bytes [T, heads, 9 D / 16] and float16 scales [T, heads].

    `order` and `channel_scales` belong to one layer and are [heads, D].
    """
    dim = rows.shape[-1]
    wide = rows.float().gather(-1, order.long().expand_as(rows)) / channel_scales
    scales, divisors = scales_of(wide)
    quarter = dim // 4
    steps = torch.full((dim,), 1.0, device=rows.device)
    steps[:quarter] = 4.0
    numbers = (wide * steps / divisors.unsqueeze(-1)).round_()
    numbers = torch.minimum(torch.maximum(numbers, -8 * steps), 8 * steps - 1)
    numbers = torch.where(scales.isnan().unsqueeze(-1), 0.0, numbers) + 8 * steps
    bits = numbers.to(torch.uint8)
    fine = bits[..., :quarter]
    upper = torch.cat((fine >> 2, bits[..., quarter:]), -1)
    low, high = upper.chunk(2, -1)
    parts = (fine & 3).view(*fine.shape[:-1], 4, -1).unbind(-2)
    lower = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
    return torch.cat((low | high << 4, lower), -1), scales


def widen(
    rows: torch.Tensor, scales: torch.Tensor, order: torch.Tensor, multipliers: torch.Tensor
) -> torch.Tensor:
    """Dequantizes bytes [B, heads, tokens, 9 D / 16] with scales [B, heads, tokens] to fp32 keys
    [B, heads, tokens, D]."""
    dim = rows.shape[-1] * 16 // 9
    pairs, lower = rows[..., : dim // 2], rows[..., dim // 2 :]
    numbers = torch.cat((pairs & 15, pairs >> 4), -1).float() - 8
    fine = torch.cat([lower >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    numbers[..., : dim // 4] = numbers[..., : dim // 4] * 4 + fine
    wide = numbers * (scales.float().unsqueeze(-1) * multipliers.unsqueeze(-2))
    index = order.long().unsqueeze(-2).expand_as(wide)
    return torch.empty_like(wide).scatter_(-1, index, wide)
