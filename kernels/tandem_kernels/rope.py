"""Rotary position embedding (RoPE) in the half-split layout of Llama checkpoints
(arXiv:2104.09864).

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)

x1 and x2 are the two halves of a head. Pair i consists of element i of both halves and is rotated
by the angle position * frequency[i].

Frequencies are fp32 [D / 2], one per pair. Models with long contexts scale the frequencies, and
never the positions. The formulas are exactly those of transformers' modeling_rope_utils.py, because
checkpoints were made with these formulas.
"""

import math

import torch


def rotary_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Returns the frequencies theta^(-2i / D) of the pairs i, [D / 2]."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))


def scale_llama3(
    frequencies: torch.Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_len: int,
) -> torch.Tensor:
    """Scales frequencies as Llama 3 does. A wavelength is the number of positions of a full turn.
    Frequencies with long wavelengths are divided by `factor`, and frequencies with short
    wavelengths are kept. Frequencies between are interpolated."""
    wavelengths = 2 * math.pi / frequencies
    smooth = (original_len / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def scale_yarn(
    frequencies: torch.Tensor,
    *,
    theta: float,
    factor: float,
    original_len: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> torch.Tensor:
    """Scales frequencies as YaRN does (arXiv:2309.00071). A pair that makes many turns within the
    original context length keeps its frequency. The frequency of a pair that makes few turns is
    divided by `factor`. Pairs between get a blend of both frequencies. YaRN also multiplies cos and
    sin by a factor, which the caller does."""
    head_dim = 2 * frequencies.shape[0]

    def pair_that_turns(times: float) -> float:
        turns = original_len / (times * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero below
    ramp = (torch.arange(head_dim // 2).float() - low) / (high - low)
    interpolated = ramp.clamp(0, 1)
    return frequencies / factor * interpolated + frequencies * (1 - interpolated)


def scale_longrope(head_dim: int, theta: float, factors: torch.Tensor) -> torch.Tensor:
    """Returns the frequencies of LongRoPE (arXiv:2402.13753), in which the frequency of pair i is
    divided by `factors[i]`."""
    return 1.0 / (factors * theta ** (torch.arange(0, head_dim, 2).float() / head_dim))


def query_factors(
    positions: torch.Tensor, *, scale: float, length: int, offset: int
) -> torch.Tensor:
    """Returns the factor on the queries at each position, fp32 [T]:
    1 + scale * ln(1 + floor((position + offset) / length))."""
    return torch.log1p(((positions + offset) // length).float()) * scale + 1.0


def rotary_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and the sines for T positions, both multiplied by `scale`, each fp32
    [T, 1, D / 2]. `scale` is a number or [D / 2]."""
    angles = (positions.float().unsqueeze(-1) * frequencies).unsqueeze(1)
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates x [T, heads, D] in fp32; the result has x's dtype."""
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    out = x.new_empty(x.shape)
    half = first.shape[-1]
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


def rotate_last_pairs(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates the last elements of the heads of x [T, heads, D] in fp32, in pairs of neighbours, as
    many as there are angles. The result has x's dtype."""
    cos, sin = angles
    num_plain = x.shape[-1] - 2 * cos.shape[-1]
    pairs = x[..., num_plain:].float()
    first, second = pairs[..., ::2], pairs[..., 1::2]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    return torch.cat((x[..., :num_plain], rotated.to(x.dtype)), -1)
