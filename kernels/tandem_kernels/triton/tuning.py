"""Finds a kernel's tile sizes: tried once for each device and class of shapes, then kept.

Triton's own autotuner does both; results lie in its cache folder (TRITON_CACHE_DIR). It knows an
architecture, not a card: so the card's name is an argument of each tuned kernel, DEVICE, and part
of its key. The interpreter measures nothing and takes the first config.

Triton also compiles a kernel anew when an integer becomes 1 or a multiple of 16, or an address one:
a step would wait seconds for that. So what changes from step to step is marked do_not_specialize.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
from triton import knobs


def tuned(
    configs: Sequence[triton.Config],
    key: Sequence[str],
    fits: Callable[[triton.Config, Mapping[str, Any]], bool] = lambda config, arguments: True,
) -> Callable[[Any], Any]:
    """Decorates a jitted kernel. `key`: names of the arguments that make a class of shapes.

    `fits` says whether a config is tried for such arguments. If none is, the first one is taken. A
    kernel is run many times while it is tuned: it must not read what it writes.
    """

    def fitting(
        configs: list[triton.Config], _: Mapping[str, Any], **arguments: Any
    ) -> list[triton.Config]:
        return [config for config in configs if fits(config, arguments)] or configs[:1]

    tried = list(configs[:1] if is_interpreted() else configs)
    decorate: Callable[[Any], Any] = triton.autotune(
        configs=tried,
        key=[*key, "DEVICE"],
        prune_configs_by={"early_config_prune": fitting},
        cache_results=True,
    )
    return decorate


def is_interpreted() -> bool:
    """Returns whether kernels run in Python on the CPU, instead of compiled on a CUDA device."""
    return bool(knobs.runtime.interpret)


@cache
def device_name(device: torch.device) -> str:
    """The card's, as in "NVIDIA H100 80GB HBM3"; "cpu" in the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the card's number of multiprocessors; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
