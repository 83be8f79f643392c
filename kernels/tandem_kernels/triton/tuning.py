"""Tunes kernels' tile sizes, once for each device and class of shapes.

Triton's autotuner measures each config, such as a tile size, and stores the fastest in Triton's
cache folder (TRITON_CACHE_DIR). The key of a stored result includes the GPU's architecture but not
the GPU's model, so each tuned kernel has an argument DEVICE with the name of the model. The
interpreter measures nothing and uses the first config.

Triton also recompiles a kernel if an integer argument becomes 1 or a multiple of 16, or if the
alignment of an address changes, which would delay a step by seconds. Arguments that change from
step to step are therefore marked do_not_specialize.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

Fits = Callable[[triton.Config, Mapping[str, Any], int], bool]

# Times of a config that spills registers are multiplied by this. So it is chosen only if each
# config spills.
_SPILL_PENALTY = 1e6


class TunedKernel(Autotuner):  # type: ignore[misc]
    """Triton's autotuner, without configs that are too large for the card.

    `fits` sorts out configs before they are compiled. What is left may still spill registers for
    the card, the dtypes or the version of Triton. Such a config is compiled and measured, and then
    not chosen. Triton itself leaves out configs that need more shared memory than the card has.
    """

    def __init__(
        self, kernel: Any, configs: Sequence[triton.Config], key: Sequence[str], fits: Fits
    ) -> None:
        self._fits = fits

        def fitting(
            _: list[triton.Config], __: Mapping[str, Any], **arguments: Any
        ) -> list[triton.Config]:
            return self.fitting(arguments, driver.active.get_current_target().arch)

        super().__init__(
            kernel,
            kernel.arg_names,
            list(configs),
            list(key),
            reset_to_zero=None,
            restore_value=None,
            prune_configs_by={"early_config_prune": fitting},
            cache_results=True,
        )

    def fitting(self, arguments: Mapping[str, Any], arch: int) -> list[triton.Config]:
        """Returns the configs to try for these arguments on an architecture, such as 90 for sm_90.
        If none fits, returns the first config."""
        fitting = [config for config in self.configs if self._fits(config, arguments, arch)]
        return fitting or self.configs[:1]

    def _bench(self, *args: Any, config: triton.Config, **meta: Any) -> list[float]:
        times = super()._bench(*args, config=config, **meta)
        if math.isinf(times[0]):  # the config was not compiled
            return list(times)
        compiled = self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
        return [time * (_SPILL_PENALTY if compiled.n_spills else 1.0) for time in times]


def tuned(
    configs: Sequence[triton.Config],
    key: Sequence[str],
    fits: Fits = lambda config, arguments, arch: True,
) -> Callable[[Any], TunedKernel]:
    """Returns a decorator that tunes a jitted kernel. `key` has the names of arguments: for each
    combination of their values, the kernel is tuned once.

    `fits` returns whether a config should be tried for given arguments on an architecture (90 for
    sm_90). If none should, the first config is used. Tuning runs a kernel many times, so the kernel
    must not read its own output.
    """

    def decorate(kernel: Any) -> TunedKernel:
        tried = configs[:1] if is_interpreted() else configs
        made = TunedKernel(kernel, tried, [*key, "DEVICE"], fits)
        _tuned_kernels.append(made)
        return made

    return decorate


_tuned_kernels: list[TunedKernel] = []


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
