"""Checks a worker's settings against the limits of its model. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.common.dtypes import DTYPE_BYTES, is_quantized
from tandem.errors import ConfigError
from tandem.models.config.model import ModelConfig

if TYPE_CHECKING:
    from tandem.common.config.engine import EngineOptions

# The size of a quantized latent must be a multiple of this, because kernels read the latent in
# vectors of 16 numbers.
_LATENT_MULTIPLE = 16


# How a model is computed that no decoder of Tandem's computes.
_HOW = {"transformers": "computed through transformers", "encoder": "an encoder"}


def check_settings(options: EngineOptions, model: ModelConfig) -> None:
    """Raises ConfigError naming the first setting that the model does not support."""
    max_context(options, model)
    if model.implementation != "tandem" and (why := _why_not_other(options, model)):
        raise ConfigError(
            f"{model.architecture} is {_HOW[model.implementation]}, which does not support these "
            f"settings: {why}"
        )
    if options.kv_dtype != "auto" and (why := why_not_kv_dtype(model, options.kv_dtype)):
        raise ConfigError(why)
    if why := why_not_block_size(model, options.block_size):
        raise ConfigError(why)
    if why := why_not_tensor_parallel(model, options.tensor_parallel):
        raise ConfigError(why)
    if options.state_dtype != "float32" and not model.has_states:
        raise ConfigError(
            f"state-dtype is {options.state_dtype}, but no layer of the model keeps a state; "
            "remove state-dtype"
        )
    why = why_no_speculation(options, model)
    if options.speculative_config not in ("off", "auto") and why:
        raise ConfigError(
            f"speculative-config is set, but {why}; set speculative-config to off or auto"
        )
    if options.expert_parallel and (why := _why_not_expert_parallel(model, options)):
        raise ConfigError(f"expert-parallel is set, but {why}; remove expert-parallel")


def why_no_speculation(options: EngineOptions, model: ModelConfig) -> str:
    """Returns why no request to a model may speculate; "" if requests may."""
    if model.has_states and options.state_dtype != "float32":
        return f"state-dtype is {options.state_dtype}; it must be float32"
    if model.shared_kv is not None:
        return "the model has compressed attention, whose KV cannot drop a rejected token"
    if model.encoder is not None:
        return "the model is an encoder"
    return ""


def _why_not_expert_parallel(model: ModelConfig, options: EngineOptions) -> str:
    """Returns the reason why the ranks cannot each have some of the experts; "" if they can."""
    nums = [layer.experts.num for layer in model.layers if layer.experts is not None]
    if not nums:
        return "the model has no experts"
    if min(nums) < options.tensor_parallel:
        return f"the model has {min(nums)} experts for {options.tensor_parallel} ranks"
    return ""


def _why_not_other(options: EngineOptions, model: ModelConfig) -> str:
    """Returns why other code than Tandem's decoders cannot compute a model with these options, or
    ""."""
    quantizes = options.kv_dtype != "auto" and is_quantized(options.kv_dtype)
    if model.encoder is not None and quantizes:
        return f"the KV dtype {options.kv_dtype} is not supported; remove kv-dtype"
    if options.tensor_parallel > 1:
        return f"tensor-parallel is {options.tensor_parallel}; it must be 1"
    if options.lora:
        return "LoRA adapters are not supported; remove lora"
    if options.weights != "auto":
        return f"weights={options.weights} is not supported; it must be auto"
    if options.numerics != "fast":
        return f"numerics={options.numerics} is not supported; it must be fast"
    if options.kernels not in ("auto", "torch"):
        return f"kernels={options.kernels} is not supported; it must be auto or torch"
    if options.kv_dtype == "int4":
        return "the KV dtype int4 is not supported, because its calibration needs Tandem's decoders"
    return ""


def why_not_tensor_parallel(model: ModelConfig, num_ranks: int) -> str:
    """Returns the reason why this number of ranks cannot share the heads of the model; "" if they
    can. A rank has whole query heads, and whole KV heads or a copy of one."""
    num_heads, parts = model.num_attention_heads, "query heads"
    if model.shared_kv is not None:  # The heads of a group share a matrix.
        num_heads, parts = model.shared_kv.num_groups, "groups of query heads"
    all_kv_heads = sorted({model.heads_of(layer).num_kv for layer in model.layers})

    def can_share(num: int) -> bool:
        return num_heads % num == 0 and all(0 in (each % num, num % each) for each in all_kv_heads)

    if can_share(num_ranks):
        return ""
    possible = ", ".join(str(num) for num in range(1, num_heads + 1) if can_share(num))
    return (
        f"tensor-parallel is {num_ranks}, but the model's {num_heads} {parts} and "
        f"{' or '.join(map(str, all_kv_heads))} KV heads cannot be divided among {num_ranks} "
        f"ranks; possible are {possible}"
    )


def why_not_pools_of_ranks(model: ModelConfig) -> str:
    """Returns the reason why several ranks cannot have a KV pool each, as on GPUs; "" if they
    can."""
    if model.index_keys is not None and model.num_kv_heads > 1:
        return "the ranks would divide KV heads whose blocks also have the keys of indexers"
    return ""


def why_irregular(model: ModelConfig) -> str:
    """Returns in what a model differs from those whose layers all have keys and values of one
    shape and nothing else; "" if it does not differ. Adapters and quantized KV need such layers."""
    if model.index_keys is not None:
        return "an indexer chooses the tokens to which a query attends"
    return why_uneven(model)


def why_uneven(model: ModelConfig) -> str:
    """Returns in what a model differs from those whose layers all have keys and values of one
    shape, with or without an indexer's keys; "" if it does not differ. The Triton kernels need such
    layers."""
    for layer in model.layers:
        if layer.kv_source is not None:
            return "some layers read the KV of earlier layers"
        if layer.heads is not None:
            return "layers have heads of different sizes"
    if model.shared_kv is not None:
        return "keys are values, and the residual stream has several streams"
    if model.value_dim is not None:
        return "values have another size than keys"
    if model.alt_up is not None:
        return "the residual stream has several copies (AltUp)"
    if model.per_layer_inputs is not None:
        return "tokens have an embedding for each layer"
    return ""


def max_context(options: EngineOptions, model: ModelConfig) -> int:
    """Returns the maximum number of tokens in a sequence. Raises ConfigError if the setting is
    larger than the context that the model was trained for."""
    if options.max_model_len is None:
        return model.max_model_len
    if not 1 <= options.max_model_len <= model.max_model_len:
        raise ConfigError(
            f"max-model-len is {options.max_model_len}; it must be from 1 to "
            f"{model.max_model_len}, the context length that the model was trained for"
        )
    return options.max_model_len


def why_not_block_size(model: ModelConfig, block_size: int) -> str:
    """Returns the reason why blocks cannot have this number of tokens; "" if they can. Each entry
    of a compressor belongs to one block."""
    rates = sorted({each.compressor.rate for each in model.layers if each.compressor is not None})
    if all(0 in (block_size % rate, rate % block_size) for rate in rates):
        return ""
    return (
        f"block-size is {block_size}; for this model it must be a multiple or a divisor of each of "
        f"{', '.join(map(str, rates))}, the numbers of tokens that become one entry"
    )


def why_not_kv_dtype(model: ModelConfig, dtype: str) -> str:
    """Returns the reason why the model's KV cannot have this dtype; "" if it can."""
    if is_quantized(dtype) and (why := why_irregular(model)):
        return f"the KV dtype {dtype} is not supported for this model: {why}"
    if dtype == "int4" and model.has_states:
        return (
            "the KV dtype int4 is not supported for a model with linear attention, because its "
            "calibration needs keys in all layers"
        )
    if model.latent is None or not is_quantized(dtype):
        return ""
    if dtype != "int8":
        return (
            f"the KV dtype {dtype} is not supported with latent attention; supported are "
            f"{', '.join(DTYPE_BYTES)}, int8"
        )
    if model.latent.kv_rank % _LATENT_MULTIPLE:
        return (
            f"the KV dtype int8 needs a model whose kv_lora_rank is a multiple of "
            f"{_LATENT_MULTIPLE}; it is {model.latent.kv_rank}"
        )
    return ""
