"""Compares the versions of CUDA for which PyTorch and NIXL are built.

NIXL's packages nixl-cu12 and nixl-cu13 may both be installed. The one for PyTorch's version of CUDA
is loaded, because both libraries use the same GPU memory.
"""

from tandem.common.cuda_build import cuda_of_torch

_PACKAGES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")


def nixl_modules() -> tuple[str, ...]:
    """Returns the names of NIXL's API modules in the order in which they are tried. The one for
    PyTorch's version of CUDA comes first."""
    wanted = f"nixl_cu{cuda_of_torch()}."
    return tuple(sorted(_PACKAGES, key=lambda name: not name.startswith(wanted)))


def why_cuda_differs(module: str) -> str:
    """Returns one line with both versions if this module of NIXL is built for another version of
    CUDA than PyTorch. Returns "" if they agree or one is unknown."""
    torch, nixl = cuda_of_torch(), module.partition(".")[0].removeprefix("nixl_cu")
    if not (torch.isdecimal() and nixl.isdecimal()) or torch == nixl:
        return ""
    return f"NIXL is built for CUDA {nixl}, and PyTorch for CUDA {torch}"
