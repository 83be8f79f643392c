"""Chooses the code that computes a model: Tandem's own decoders, or the transformers library.

transformers is imported only if it computes the model, and in a process of its own, because it also
imports torch.
"""

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from tandem.common.config.groups import ModelImpl
from tandem.common.process.bounded_child import run_bounded
from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.config.encoder import ID_DIGITS, is_encoder, read_encoder
from tandem.models.config.families import FAMILIES
from tandem.models.config.layers import LayerSpec
from tandem.models.config.model import ModelConfig, read_dtype, read_eos_token_ids
from tandem.models.config.rope import NO_ROPE
from tandem.models.config.score_head import decoder_of

EXTRA = "tandem-llm[transformers]"
# The sizes and properties that only Tandem's own decoders use.
_UNUSED: Mapping[str, Any] = {
    "intermediate_size": 0,
    "rms_norm_eps": 0.0,
    "qkv_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "qk_norm": "",
}
# Bounds of the process that reads a config. Importing transformers and torch takes most of them.
_CPU_S = 120
_MEMORY_BYTES = 32 << 30
_DEADLINE_S = 300.0


def read_model_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    model_impl: ModelImpl,
) -> ModelConfig:
    """Reads the parsed contents of config.json and generation_config.json.

    With "auto", transformers computes the model if it is installed and Tandem's own decoders lack
    the architecture. Raises UnsupportedModel naming the field that is not supported, and
    ConfigError if `model_impl` is "transformers" and the library is not installed.
    """
    is_installed = find_spec("transformers") is not None
    if model_impl == "transformers" and not is_installed:
        raise ConfigError(
            f"model-impl is transformers, but the library is not installed; install {EXTRA}"
        )
    if is_encoder(config) and model_impl != "transformers":
        return ModelConfig(
            **read_encoder(config),
            **_UNUSED,
            layers=(LayerSpec(rope=NO_ROPE),),
            num_attention_heads=1,
            num_kv_heads=1,
            head_dim=ID_DIGITS,
            tie_word_embeddings=True,
            eos_token_ids=read_eos_token_ids(config, generation_config),
            torch_dtype=read_dtype(config),
            implementation="encoder",
        )
    if model_impl == "tandem" or (model_impl == "auto" and _is_own(config)):
        return ModelConfig.from_hf(config, generation_config)
    if not is_installed:
        try:
            return ModelConfig.from_hf(config, generation_config)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"{error.message}. With {EXTRA}, more architectures are supported"
            ) from error
    sizes = _read_sizes(config)
    windows, are_chunked = sizes.pop("windows"), sizes.pop("are_chunked")
    return ModelConfig(
        **sizes,
        layers=tuple(
            LayerSpec(rope=NO_ROPE, window=window, is_chunked=is_chunked)
            for window, is_chunked in zip(windows, are_chunked, strict=True)
        ),
        eos_token_ids=read_eos_token_ids(config, generation_config),
        torch_dtype=read_dtype(config),
        implementation="transformers",
        **_UNUSED,
    )


def _read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `DecoderSizes` of from_transformers.py, which runs in a child process. Raises
    UnsupportedModel."""
    output, status = run_bounded(
        [sys.executable, "-I", "-m", f"{__package__}.from_transformers"],
        json.dumps(config).encode(),
        cpu_s=_CPU_S,
        memory_bytes=_MEMORY_BYTES,
        deadline_s=_DEADLINE_S,
    )
    lines = output.decode(errors="replace").splitlines() or [
        f"transformers fails to read the config (exit status {status})"
    ]
    if status:
        raise UnsupportedModel(lines[-1])
    sizes: dict[str, Any] = json.loads(lines[-1])
    return sizes


def _is_own(config: Mapping[str, Any]) -> bool:
    """Returns whether Tandem's own decoders have the architecture or name the reason why they do
    not: a multimodal checkpoint or a missing `architectures`."""
    named = config.get("architectures")
    is_multimodal = "text_config" in config or "vision_config" in config
    if not isinstance(named, list) or not named or is_multimodal:
        return True
    return not isinstance(named[0], str) or (decoder_of(named[0]) or named[0]) in FAMILIES
