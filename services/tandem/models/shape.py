"""Reads only the config of a model, its "shape", without weights, tokenizer or conversion.

A model is given by a name that `source.resolve` accepts, or by the path of a config.json.
"""

from pathlib import Path

from tandem.errors import ConfigError
from tandem.models.config.experts import Experts
from tandem.models.config.model import ModelConfig
from tandem.models.files import naming, read_json, read_json_if_any
from tandem.models.gguf.convert import gguf_config
from tandem.models.source import BUILT_IN, built_in_file


def read_shape(model: str, *, revision: str = "") -> ModelConfig:
    """Reads the config of `model`: a folder, a config.json, a GGUF file, the built-in model or a
    name on the Hugging Face hub.

    Raises ConfigError if the model is not found, UnsupportedModel if it cannot be run.
    """
    path = Path(model).expanduser()
    if model == BUILT_IN and not path.exists():
        if (file := built_in_file()) is None:
            raise ConfigError(
                "the built-in model is not on this machine; run `tandem up` once to download it"
            )
        return gguf_config(file)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no GGUF file {path}")
        return gguf_config(path)
    if path.is_dir():
        return _read_config(path / "config.json")
    if path.exists() or path.suffix == ".json" or path.is_absolute() or model[:1] in (".", "~"):
        return _read_config(path)
    return _read_config(_from_hub(model, revision))


def num_parameters(model: ModelConfig) -> int:
    """Returns the number of parameters: weights, biases and norms."""
    hidden = model.hidden_size
    attention = _latent_parameters(model) if model.latent else _attention_parameters(model)
    mlps = sum(_mlp_parameters(model, layer.experts) for layer in model.layers)
    norms = (4 if model.norms == "around" else 2) * hidden
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return embeddings + model.num_layers * (attention + norms) + mlps + hidden


def _attention_parameters(model: ModelConfig) -> int:
    hidden = model.hidden_size
    heads = model.num_attention_heads * model.head_dim
    kv = model.num_kv_heads * model.head_dim
    norms = 0
    if model.qk_norm:
        norms = heads + kv if model.qk_norm == "all" else 2 * model.head_dim
    norms += model.num_attention_heads * model.has_sinks
    biases = (heads + 2 * kv) * model.qkv_bias + hidden * model.attention_out_bias
    return 2 * hidden * (heads + kv) + norms + biases


def _latent_parameters(model: ModelConfig) -> int:
    latent = model.latent
    hidden = model.hidden_size
    heads = model.num_attention_heads
    assert latent is not None
    has_bias = model.qkv_bias
    if latent.q_rank is None:
        queries = hidden * heads * latent.q_dim
    else:
        queries = latent.q_rank * (hidden + 1 + has_bias + heads * latent.q_dim)
    per_token = (hidden + has_bias) * latent.kv_dim + latent.kv_rank
    per_head = heads * (latent.plain_dim + latent.value_dim) * latent.kv_rank
    out = hidden * (heads * latent.value_dim + model.attention_out_bias)
    return queries + per_token + per_head + out


def _mlp_parameters(model: ModelConfig, experts: Experts | None) -> int:
    hidden = model.hidden_size
    inner = experts.shared_inner if experts else model.intermediate_size
    dense = 3 * hidden * inner + (2 * inner + hidden) * (model.mlp_bias and inner > 0)
    if experts is None:
        return dense
    biases = (2 * experts.inner + hidden + 1) * experts.has_biases
    return dense + experts.num * (3 * hidden * experts.inner + hidden + biases)


def _read_config(path: Path) -> ModelConfig:
    if not path.is_file():
        raise ConfigError(
            f"there is no file {path}; give a folder that has a config.json, the config.json "
            f"itself, a .gguf file, {BUILT_IN}, or a name on the hub"
        )
    with naming(path):
        generation = path.with_name("generation_config.json")
        return ModelConfig.from_hf(read_json(path), read_json_if_any(generation))


def _from_hub(name: str, revision: str) -> Path:
    # Imported here because the import is slow and only hub names need it.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision or None))
    except (OSError, ValueError) as error:  # These are the base classes of the library's errors.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{name} is not a folder on this machine, and its config.json cannot be downloaded "
            f"from the hub ({reason})"
        ) from error
