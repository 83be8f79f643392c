from __future__ import annotations

import subprocess
import sys

import pytest

from tandem_kernels.dispatch import kernels_for


def test_cpu_and_cuda_have_kernels_in_both_numerics() -> None:
    for device in ("cpu", "cuda"):
        assert kernels_for(device, "fast").row_multiple == 1
        assert kernels_for(device, "invariant").row_multiple == 16


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'mps'; there are for cpu and cuda"):
        kernels_for("mps", "fast")


def test_importing_the_package_loads_no_torch() -> None:
    """The package transformers probes for a package of this name."""
    code = "import sys, kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0
