"""Rotary frequencies against transformers' own tables, and the rotation against its meaning."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tandem_kernels.rope import rotary_angles, rotary_frequencies, rotate, scale_llama3, scale_yarn

THETA = 10000.0
HEAD_DIM = 64


def reference(parameters: dict[str, object]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": THETA, **parameters},
    )
    return LlamaRotaryEmbedding(config)


def test_unscaled() -> None:
    expected = reference({"rope_type": "default"}).inv_freq
    torch.testing.assert_close(rotary_frequencies(HEAD_DIM, THETA), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (2.0, 32.0)])
def test_llama3(low: float, high: float) -> None:
    parameters = {"factor": 8.0, "low_freq_factor": low, "high_freq_factor": high}
    expected = reference(
        {"rope_type": "llama3", "original_max_position_embeddings": 512, **parameters}
    ).inv_freq
    scaled = scale_llama3(rotary_frequencies(HEAD_DIM, THETA), original_len=512, **parameters)
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (40.0, 40.0), (1e6, 1e-6)])
def test_yarn(fast: float, slow: float, truncate: bool) -> None:
    parameters = {"factor": 4.0, "beta_fast": fast, "beta_slow": slow, "truncate": truncate}
    expected = reference(
        {"rope_type": "yarn", "original_max_position_embeddings": 1024, **parameters}
    ).inv_freq
    scaled = scale_yarn(
        rotary_frequencies(HEAD_DIM, THETA), theta=THETA, original_len=1024, **parameters
    )
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)


def test_a_pair_is_turned_by_position_times_frequency() -> None:
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 5, 1000])
    frequencies = rotary_frequencies(8, THETA)
    result = rotate(x, rotary_angles(positions, frequencies, 1.0))
    turns = torch.polar(torch.ones(3, 1, 4), positions.view(3, 1, 1) * frequencies)
    expected = torch.complex(x[..., :4], x[..., 4:]) * turns
    torch.testing.assert_close(
        result, torch.cat((expected.real, expected.imag), -1), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(result[0], x[0])


def test_bfloat16_is_rotated_in_float32() -> None:
    x = torch.randn(4, 2, 8).bfloat16()
    angles = rotary_angles(torch.arange(4) * 100, rotary_frequencies(8, THETA), 1.25)
    result = rotate(x, angles)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, rotate(x.float(), angles).bfloat16())
