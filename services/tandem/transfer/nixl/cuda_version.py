"""The versions of CUDA for which PyTorch and NIXL are built.

NIXL's packages nixl-cu12 and nixl-cu13 may both be installed. The one for PyTorch's version of CUDA
is loaded, because both libraries use the same GPU memory. All versions are read from the packages'
metadata, so nothing is imported.
"""

from importlib import metadata

_PACKAGES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")


def installed_version(package: str) -> str:
    """Returns the version of a Python package, or "" if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def cuda_of_torch() -> str:
    """Returns the major version of CUDA for which PyTorch is built, such as "12". Returns "cpu" for
    a build without CUDA, and "" if the version is unknown."""
    build = installed_version("torch").partition("+")[2]
    # The version of PyPI's build of PyTorch has no suffix such as +cu126. So the version of the
    # installed CUDA package is used.
    if not build:
        for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
            if version := installed_version(package):
                return version.partition(".")[0]
    return build[2:4] if build.startswith("cu") else build


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
