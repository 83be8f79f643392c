from __future__ import annotations

import torch

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem_kernels.kv_int4_keys import KeyChannels, quantize, widen
from tests.kv_pools import some_channels

TOKENS, HEADS, DIM = 50, 3, 64


def channels_of(head_dim: int = DIM) -> KeyChannels:
    return some_channels(BlockLayout(1, HEADS, 2, 16, head_dim, "int4"))


def read(rows: torch.Tensor, channels: KeyChannels, layer: int = 1) -> torch.Tensor:
    numbers, scales = quantize(rows, channels.order[layer], channels.scales[layer])
    wide = widen(
        numbers.transpose(0, 1).unsqueeze(0),
        scales.t().unsqueeze(0),
        channels.order[layer],
        channels.multipliers[layer],
    )
    return wide[0].transpose(0, 1)


def test_a_number_is_within_half_a_step_of_its_channel() -> None:
    for head_dim in (16, 64, 80, 128):
        channels = channels_of(head_dim)
        rows = torch.randn(TOKENS, HEADS, head_dim, generator=torch.Generator().manual_seed(4))
        numbers, scales = quantize(rows, channels.order[1], channels.scales[1])
        assert numbers.shape == (TOKENS, HEADS, head_dim // 2 + head_dim // 16)
        order = channels.order[1].long().expand_as(rows)
        error = (read(rows, channels) - rows).abs().gather(-1, order)
        steps = scales.float().abs().unsqueeze(-1) * channels.multipliers[1]
        scaled = rows.gather(-1, order) / channels.scales[1]
        is_opposite = scaled / scales.float().unsqueeze(-1) > 7.5  # would be 8, or 31 and a half
        assert bool((error <= steps * torch.where(is_opposite, 4.0, 0.5001)).all())
        assert bool((error <= steps * 0.5001).float().mean() > 0.98)


def test_the_first_quarter_is_four_times_as_fine() -> None:
    channels = KeyChannels(torch.arange(16).int().expand(1, 1, 16), torch.ones(1, 1, 16))
    row = torch.tensor([[[-8.0, 0.25, 1.75, 7.75, *[0.25, 1.75, 2.5] * 4]]])
    expected = [-8.0, 0.25, 1.75, 7.75, *[0.0, 2.0, 2.0] * 4]
    assert read(row, channels, 0).flatten().tolist() == expected


def test_zeros_and_numbers_that_are_not_finite() -> None:
    channels = channels_of()
    rows = torch.ones(3, HEADS, DIM)
    rows[0], rows[1, 0, 5], rows[2, 1, 7] = 0.0, torch.nan, torch.inf
    wide = read(rows, channels)
    assert not wide[0].any()
    assert bool(wide[1, 0].isnan().all())
    assert bool(wide[2, 1].isnan().all())
    assert bool(wide[1, 1:].isfinite().all())


def test_a_keys_bytes_depend_on_nothing_else() -> None:
    channels = channels_of()
    rows = torch.randn(TOKENS, HEADS, DIM)
    whole = quantize(rows, channels.order[0], channels.scales[0])
    for i in (0, 7, 49):
        alone = quantize(rows[i : i + 1], channels.order[0], channels.scales[0])
        assert torch.equal(alone[0][0], whole[0][i])
        assert torch.equal(alone[1][0], whole[1][i])


def test_the_digest_tells_channels_apart() -> None:
    channels = channels_of()
    other = KeyChannels(channels.order.flip(0), channels.scales)
    assert channels.digest == channels_of().digest != other.digest
