"""The version of CUDA for which the installed PyTorch is built.

All versions are read from the packages' metadata, so nothing is imported.
"""

from importlib import metadata


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
