"""Chooses the kernels that compute a model on a device: native (C++), Triton or torch.

The setting `kernels` names the kernels. With "auto", the fastest kernels for the device are used.
If those kernels cannot compute the model, the torch kernels are used.
"""

import importlib.util
import logging
import os
import shutil
from typing import Literal

import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.card_dtypes import describe, is_old
from tandem.engine.executor.native.decoder import why_not_native
from tandem.errors import ConfigError
from tandem.models.config.linear_attention import GatedDelta, KimiDelta, LinearAttention
from tandem.models.config.model import ModelConfig
from tandem.models.limits import why_uneven
from tandem_kernels.native.library import why_unusable

log = logging.getLogger(__name__)

Choice = Literal["native", "torch", "triton"]


def choose_kernels(config: EngineConfig, device: torch.device, model: ModelConfig) -> Choice:
    """Returns the kernels for a model on a device.

    Raises ConfigError if the settings name kernels that cannot compute the model, or if the native
    kernels were not built for this processor. With "auto", logs a warning if the choice is torch
    because the faster kernels cannot compute the model.
    """
    if model.implementation != "tandem":
        return "torch"
    chosen = _choose(config, device, model)
    num_ranks = config.tensor_parallel
    if chosen == "torch" and (why := _why_not_share_states(model, num_ranks)):
        raise ConfigError(f"tensor-parallel is {num_ranks}, but {why}")
    return chosen


def _why_not_share_states(model: ModelConfig, num_ranks: int) -> str:
    """Returns why ranks of torch kernels, which have whole heads of states each, cannot share the
    states of a model; "" if they can. Native kernels need no whole heads."""
    for layer in model.layers:
        if layer.linear is not None and (num := layer.linear.num_heads) % num_ranks:
            possible = ", ".join(str(each) for each in range(1, num + 1) if num % each == 0)
            return (
                f"the {num} heads of the model's states cannot be divided among {num_ranks} ranks "
                f"of torch kernels; possible are {possible}"
            )
    return ""


def _choose(config: EngineConfig, device: torch.device, model: ModelConfig) -> Choice:
    fastest: Choice = "triton" if device.type == "cuda" else "native"
    chosen = fastest if config.kernels == "auto" else config.kernels
    if chosen == "native" and device.type == "cpu" and (reason := why_unusable()):
        raise ConfigError(
            f"{reason}. Run `make` in the repository, or install the package again. kernels=torch "
            "needs no native kernels, but is many times slower"
        )
    reason = _why_not(chosen, config, device, model)
    if reason and config.kernels != "auto":
        raise ConfigError(f"kernels={chosen} cannot be used here: {reason}")
    if config.weights == "int8" and (reason or chosen != "native"):
        why = reason or f"the kernels here are {chosen}"
        raise ConfigError(f"weights=int8 needs native kernels: {why}")
    if reason:
        log.warning(
            "the %s kernels cannot be used here: %s. The torch kernels are used and are several "
            "times slower",
            chosen,
            reason,
        )
        return "torch"
    return chosen


def _why_not(chosen: Choice, config: EngineConfig, device: torch.device, model: ModelConfig) -> str:
    if chosen == "native":
        if device.type != "cpu":
            return f"the native kernels compute on CPUs only, and the device is {device.type}"
        if config.expert_parallel:
            return "expert-parallel needs torch or triton kernels; native ones divide each expert"
        return why_not_native(model)
    if chosen != "triton":
        return ""
    if config.state_dtype != "float32":
        return f"only the native and torch kernels support states in {config.state_dtype}"
    if model.latent is not None and config.kv_dtype == "int8":
        return "only the native and torch kernels read int8 KV of latent attention"
    if config.kv_dtype in ("k8v4", "int4"):
        return (
            f"only the native and torch kernels read {config.kv_dtype} KV; "
            "triton reads float32, bfloat16, int8 and fp8_e4m3"
        )
    num_ranks = config.tensor_parallel
    if num_ranks > 1 and not all(_can_divide(layer.linear, num_ranks) for layer in model.layers):
        return (
            f"{num_ranks} ranks of Triton kernels need layers with states that are Gated DeltaNet "
            "and can be divided into whole heads of keys"
        )
    if config.lora and (why := why_no_triton_adapters(model)):
        return why
    return why_not_triton_model(model) or why_not_triton(device, config.numerics)


def why_no_triton_adapters(model: ModelConfig) -> str:
    """Returns why the Triton kernels cannot compute adapters of a model, or an empty string."""
    if model.has_states or model.has_attention_gates or model.has_head_gates:
        return "the Triton kernels do not support adapters of models with states or gates"
    return ""


def _can_divide(linear: LinearAttention | None, num_ranks: int) -> bool:
    return linear is None or (isinstance(linear, GatedDelta) and linear.shares_nothing(num_ranks))


def why_not_triton_model(model: ModelConfig) -> str:
    """Returns why the Triton kernels cannot compute a model, or an empty string if they can."""
    if why := why_uneven(model):
        return f"the Triton kernels do not compute this model: {why}"
    if model.is_parallel or model.centers_norms:
        return "only the native and torch kernels compute LayerNorms and parallel blocks"
    if model.norms_rotated_heads:
        return "only the native and torch kernels normalize queries and keys after RoPE"
    if any(layer.is_chunked for layer in model.layers):
        return "only the native and torch kernels compute attention in chunks"
    if any(isinstance(layer.linear, KimiDelta) for layer in model.layers):
        return "only the native and torch kernels compute Kimi Delta Attention"
    if any(layer.experts and layer.experts.weighs_inputs for layer in model.layers):
        return "only the native and torch kernels multiply the inputs of experts by their weights"
    return ""


def why_not_triton(device: torch.device, numerics: str) -> str:
    """Returns why the Triton kernels cannot run on this device with these numerics, or an empty
    string if the kernels can run."""
    if numerics == "invariant":
        return "only the torch and native kernels support the invariant numerics"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return ""
        return (
            f"the device is {device.type}, and Triton's interpreter is off (TRITON_INTERPRET=1 "
            "enables it)"
        )
    if is_old(device):
        return f"Triton needs compute capability 8.0 or later, and the card is {describe(device)}"
    return _why_no_launcher()


def _why_no_launcher() -> str:
    """Returns why Triton cannot compile C code, or an empty string if it can.

    At the first launch of a kernel, Triton compiles a C function that launches the kernel, and
    raises an exception if there is no C compiler. This function looks for a compiler in the same
    places as Triton (triton/runtime/build.py).
    """
    named = os.environ.get("CC")
    compilers = ("gcc", "clang") if named is None else (named,)
    if any(shutil.which(compiler) for compiler in compilers):
        return ""
    if named is None:
        return "Triton needs a C compiler: gcc and clang are not installed, and CC is not set"
    return f"Triton needs a C compiler: CC is {named!r}, which is not installed"
