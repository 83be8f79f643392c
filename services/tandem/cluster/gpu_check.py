"""Checks that CUDA and the installed PyTorch can use this machine's GPUs, before a model is loaded.

The version of the driver comes from /proc, and everything else from the driver's library, libcuda.
This module creates no CUDA context, so it takes no memory of a GPU. It does not import torch.
"""

import ctypes
import re
from pathlib import Path
from typing import Any, NamedTuple

from tandem.common.cuda_build import cuda_of_torch

_DRIVER = re.compile(r"Kernel Module.*?\s(\d+)\.(\d[\d.]*)")
# CUDA major version -> oldest driver version that supports it:
# https://docs.nvidia.com/deploy/cuda-compatibility/
_DRIVER_MIN = {"12": 525, "13": 580}


class Driver(NamedTuple):
    """The version of NVIDIA's driver, such as 570 and "86.15"."""

    major: int
    rest: str

    def __str__(self) -> str:
        return f"{self.major}.{self.rest}"


class Unusable(NamedTuple):
    """Why PyTorch cannot use a GPU, and a remedy."""

    why: str
    remedy: str


def read_driver(root: Path = Path("/")) -> Driver | None:
    """Returns the version of the loaded driver, or None if no driver is loaded."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = _DRIVER.search(text)
    return Driver(int(found[1]), found[2]) if found else None


def why_unusable(driver: Driver | None) -> Unusable | None:
    """Returns why the installed PyTorch cannot use a GPU with this driver. Returns None if it can,
    or if that is unknown."""
    if (cuda := cuda_of_torch()) == "cpu":
        return Unusable("PyTorch is built for CPUs", "install PyTorch's CUDA build")
    oldest = _DRIVER_MIN.get(cuda, 0)
    if driver is not None and driver.major < oldest:
        return Unusable(
            f"PyTorch is built for CUDA {cuda}, which needs driver {oldest}",
            "update the driver, or install PyTorch's build for an older CUDA",
        )
    return None


class Cards(NamedTuple):
    """What the driver's library says of the GPUs that CUDA shows to this process."""

    total_bytes: tuple[int, ...] = ()  # the memory of each GPU; empty if it is not known
    fault: str = ""  # why CUDA does not start; "" if it does, or if there is no library


def read_cards(library: Any = None) -> Cards:
    """Reads the memory of each GPU. `library` replaces libcuda in tests."""
    if library is None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return Cards()
    if code := library.cuInit(0):
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        why = text.value.decode("utf-8", "replace") if text.value else "unknown error"
        return Cards(fault=f"CUDA does not start: {why} (error {code})")
    number = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(number))
    sizes: list[int] = []
    for index in range(number.value):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        if library.cuDeviceGet(ctypes.byref(device), index):
            return Cards()
        if library.cuDeviceTotalMem_v2(ctypes.byref(size), device):
            return Cards()
        sizes.append(size.value)
    return Cards(tuple(sizes))
