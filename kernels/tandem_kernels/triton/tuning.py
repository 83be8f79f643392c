"""Tunes kernels' tile sizes, once for each device and class of shapes.

Triton's autotuner measures each config, such as a tile size, and stores the fastest in Triton's
cache folder (TRITON_CACHE_DIR). The key of a stored result includes the GPU's architecture but not
the GPU's model, so each tuned kernel has an argument DEVICE with the name of the model. The
interpreter measures nothing and uses the first config.

Triton also recompiles a kernel if an integer argument becomes 1 or a multiple of 16, or if the
alignment of an address changes, which would delay a step by seconds. Arguments that change from
step to step are therefore marked do_not_specialize.
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
    """Returns a decorator that tunes a jitted kernel. `key` has the names of arguments: for each
    combination of their values, the kernel is tuned once.

    `fits` returns whether a config should be tried for given arguments. If none should, the first
    config is used. Tuning runs a kernel many times, so the kernel must not read its own output.
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

    def decorate_and_list(kernel: Any) -> Any:
        kernel = decorate(kernel)
        _tuned_kernels.append(kernel)
        return kernel

    return decorate_and_list


_tuned_kernels: list[Any] = []


def choices() -> dict[str, dict[str, str]]:
    """Returns the config that tuning has chosen in this process, for each kernel and key. The first
    values of a key are those of the arguments in `tuned`'s `key`."""
    return {
        kernel.base_fn.__name__: {str(key): str(config) for key, config in kernel.cache.items()}
        for kernel in _tuned_kernels
    }


def is_interpreted() -> bool:
    """Returns whether kernels run in Python on the CPU, instead of compiled on a CUDA device."""
    return bool(knobs.runtime.interpret)


@cache
def device_name(device: torch.device) -> str:
    """Returns the GPU's name, such as "NVIDIA H100 80GB HBM3"; "cpu" in the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of the GPU; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
