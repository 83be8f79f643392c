"""Descriptions of models in the format of Ollama's API."""

from collections.abc import Sequence
from typing import Any

from tandem.api.ollama.replies import time_text
from tandem.router.request.generator import Generator, LoadedModel

# The version of Ollama whose API these routes have. Clients compare it with the one that they need.
API_VERSION = "0.12.11"
_NEVER = "9999-01-01T00:00:00Z"  # when the model will be unloaded


def listed(generator: Generator, names: Sequence[str]) -> list[dict[str, Any]]:
    """Lists a model under these names, as /api/tags does. The names are its own and those of its
    adapters."""
    model = generator.model
    return [] if model is None else [_entry(model, name) for name in names]


def running(generator: Generator, names: Sequence[str]) -> list[dict[str, Any]]:
    """Lists a model in memory under these names, as /api/ps does."""
    own = {"expires_at": _NEVER, "size_vram": 0, "context_length": generator.max_model_len}
    return [{**one, **own} for one in listed(generator, names)]


def shown(generator: Generator, model: LoadedModel) -> dict[str, Any]:
    """Describes the model, as /api/show does."""
    config = model.folder.config
    family = _family(model)
    template = model.tokenizer.chat_template
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in model.sampling.items()),
        "template": "" if template is None else template.source,
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": model.folder.num_weights,
            f"{family}.block_count": config.num_layers,
            f"{family}.context_length": generator.max_model_len,
            f"{family}.embedding_length": config.hidden_size,
        },
        "capabilities": _capabilities(model),
        "modified_at": time_text(model.created_s),
    }


def _entry(model: LoadedModel, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(model.created_s),
        "size": sum(file.stat().st_size for file in model.folder.weight_files),
        "digest": model.folder.fingerprint,
        "details": _details(model),
    }


def _details(model: LoadedModel) -> dict[str, Any]:
    family = _family(model)
    return {
        "parent_model": "",
        "format": "gguf" if model.folder.is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _parameters(model.folder.num_weights),
        "quantization_level": "unknown",
    }


def _capabilities(model: LoadedModel) -> list[str]:
    if "generate" not in model.tasks:
        return ["embedding"]
    template = model.tokenizer.chat_template
    can = {
        "completion": True,
        "tools": template is not None,
        "thinking": model.model_format.reasons,
        "vision": model.preparer.takes_images,
    }
    return [name for name, is_able in can.items() if is_able]


def _family(model: LoadedModel) -> str:
    return model.folder.config.architecture.removesuffix("ForCausalLM").lower()


def _parameters(number: int) -> str:
    """Formats a number of parameters, such as 1.7B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
