"""Loads a model class of the transformers library with its weights, from safetensors alone."""

import logging
from inspect import signature
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as library_logging

from tandem.engine.executor.weights.load import OnProgress
from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.config.from_transformers import read_hf_config
from tandem.models.files import few, read_json
from tandem.models.folder import ModelFolder

log = logging.getLogger(__name__)


def load_model(
    folder: ModelFolder, *, dtype: torch.dtype, device: torch.device, on_progress: OnProgress
) -> PreTrainedModel:
    """Loads the model in `dtype`. Python code of the folder is never run.

    Raises UnsupportedModel if the class does not support attention functions, and, before the
    model is used, if tensors are missing, surplus or wrongly shaped. Raises ConfigError if a file
    cannot be read.
    """
    name = folder.config.architecture
    config = read_hf_config(read_json(folder.path / "config.json"))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    check_class(model_class)
    log.warning(
        "%s is computed by the transformers library with torch attention, which is several times "
        "slower than Tandem's own decoders",
        name,
    )
    library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    num_bytes = sum(file.stat().st_size for file in folder.weight_files)
    try:
        model, found = model_class.from_pretrained(
            folder.weight_files[0].parent,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers cannot load {folder.path}: {reason:.300}") from error
    for problem, names in (
        ("lacks", found["missing_keys"]),
        ("has tensors that the model does not:", found["unexpected_keys"]),
        ("has tensors of another shape:", [each[0] for each in found["mismatched_keys"]]),
    ):
        if names:
            raise UnsupportedModel(f"{folder.path}: the checkpoint {problem} {few(sorted(names))}")
    on_progress(num_bytes, num_bytes)
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Raises UnsupportedModel if a class cannot compute with paged KV."""
    name = model_class.__name__
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{name} of transformers {transformers.__version__} is not supported: the class does "
            "not accept other attention code (no _supports_attention_backend)"
        )
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(
            f"{name} of transformers {transformers.__version__} is not supported: some layers of "
            "the model keep a state"
        )
    missing = {"position_ids", "logits_to_keep"} - set(signature(model_class.forward).parameters)
    if missing:
        raise UnsupportedModel(
            f"{name} of transformers {transformers.__version__} is not supported: the forward "
            f"function lacks the parameters {', '.join(sorted(missing))}"
        )
