"""Checks the dtypes of a computation against a CUDA device.

Triton's kernels and bfloat16 need a card of compute capability 8.0 (A100) or later. An older card
computes in float32 with the torch kernels. There is no computation in float16: its largest number,
65,504, is less than the activations of some models that were trained in bfloat16.
"""

import logging

import torch

from tandem.common.config.engine import EngineConfig
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

CAPABILITY_MIN = (8, 0)  # compute capability for bfloat16 and Triton


def is_old(device: torch.device) -> bool:
    """Returns whether a CUDA device has neither bfloat16 nor support by Triton."""
    return torch.cuda.get_device_capability(device) < CAPABILITY_MIN


def describe(device: torch.device) -> str:
    """Returns the card's name and compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def check_dtypes(
    config: EngineConfig, device: torch.device, *, dtype: str, checkpoint_dtype: str
) -> None:
    """Raises ConfigError if the settings name bfloat16 and the card has none, or a dtype of states
    that no card supports. Logs a warning if a checkpoint in float16 loses precision. `dtype` is
    that of the computation. On a CPU, it does nothing."""
    if device.type != "cuda":
        return
    if config.state_dtype != "float32":
        raise ConfigError(
            f"state-dtype is {config.state_dtype}; it must be float32 on a GPU, because only CPUs "
            "support other types"
        )
    named = {"dtype": config.dtype, "kv-dtype": config.kv_dtype}
    for option, value in named.items():
        if value == "bfloat16" and is_old(device):
            raise ConfigError(
                f"{option}=bfloat16 needs a card with compute capability 8.0 or later, not "
                f"{describe(device)}; use {option}=auto (float32 on this card)"
            )
    if checkpoint_dtype == "float16" and dtype == "bfloat16":
        log.warning(
            "the float16 checkpoint is computed in bfloat16, with 8 instead of 11 bits of "
            "precision; use dtype=float32 to keep all bits"
        )
