"""Reads RoPE scaling from a GGUF file's keys and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.errors import UnsupportedModel
from tandem.models.gguf.deepseek import latent_rope
from tandem.models.gguf.names import ROPE_FREQS, ROPE_LONG, ROPE_SHORT

if TYPE_CHECKING:
    from tandem.models.gguf.metadata import GgufMetadata

_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


def rope_scaling(
    metadata: GgufMetadata, *, theta: float, tables: Mapping[str, np.ndarray]
) -> dict[str, Any] | None:
    """Returns `rope_scaling` for config.json; None if there is no scaling. Raises UnsupportedModel
    if config.json cannot express the scaling."""
    if ROPE_LONG in tables or ROPE_SHORT in tables:
        return _longrope(metadata, tables)
    if ROPE_FREQS in tables:
        return _llama3_scaling(tables[ROPE_FREQS], theta=theta)
    kind = metadata.of_model("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    original = metadata.size("rope.scaling.original_context_length", None)
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    if metadata.architecture == "gpt-oss":
        scaling["truncate"] = False
    for name, key in _YARN.items():
        if (value := metadata.number(f"rope.scaling.{key}", None)) is not None:
            scaling[name] = value
    return scaling | latent_rope(metadata) if metadata.architecture == "deepseek2" else scaling


def _longrope(metadata: GgufMetadata, tables: Mapping[str, np.ndarray]) -> dict[str, Any]:
    if metadata.architecture != "phi3" or not {ROPE_LONG, ROPE_SHORT} <= tables.keys():
        raise UnsupportedModel(
            f"the tensors {ROPE_LONG} and {ROPE_SHORT} are supported only together and only for "
            f"the architecture phi3; this file has {', '.join(sorted(tables))} and the "
            f"architecture {metadata.architecture}"
        )
    scaling = {
        "rope_type": "longrope",
        "long_factor": tables[ROPE_LONG].tolist(),
        "short_factor": tables[ROPE_SHORT].tolist(),
    }
    factor = metadata.number("rope.scaling.attn_factor", None)
    return scaling if factor is None else scaling | {"attention_factor": factor}


def _llama3_scaling(rope_freqs: np.ndarray, *, theta: float) -> dict[str, Any]:
    """Derives the llama3 scaling parameters from GGUF's table of frequency divisors.

    A GGUF file stores only the table. The factor is the table's largest entry, and the other
    parameters are the same in Llama 3.1, 3.2 and 3.3. To check this, the table is computed again
    from the parameters. A difference from the stored table raises UnsupportedModel.
    """
    factor = float(rope_freqs.max())
    low = 1.0
    high = 4.0
    original = 8192
    half = rope_freqs.size
    wavelengths = 2 * np.pi * theta ** (np.arange(half, dtype=np.float64) / half)
    smooth = (original / wavelengths - low) / (high - low)
    expected = np.where(
        wavelengths < original / high,
        1.0,
        np.where(wavelengths > original / low, factor, 1 / ((1 - smooth) / factor + smooth)),
    )
    if not np.allclose(expected, rope_freqs, rtol=1e-4):
        raise UnsupportedModel(
            "rope_freqs.weight does not have the values of Llama 3's rope scaling (llama3). "
            "In a file with this tensor, no other rope scaling is supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
