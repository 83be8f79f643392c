"""Reads only the config of a model, its "shape", without weights, tokenizer or conversion.

A model is given by a name that `source.resolve` accepts, or by the path of a config.json.
"""

from math import prod
from pathlib import Path

from tandem.errors import ConfigError
from tandem.models.checkpoint.expert_names import STACKED_EXPERTS
from tandem.models.checkpoint.weight_shapes import expected_shapes
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
    """Returns the number of numbers in the model's tensors: weights, biases, norms and the
    corrections of experts."""
    # With stacked experts, there is one name for all experts of a layer.
    return sum(map(prod, expected_shapes(model, STACKED_EXPERTS).values()))


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
