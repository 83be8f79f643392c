"""Every kernel compiles for the architectures that it is written for, on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.unit.kernels.triton.compile_for import Compiled, faults

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        (90, ["-s"]),
        *(pytest.param(arch, ["-v"], marks=pytest.mark.slow) for arch in (80, 90, 100, 120)),
    ],
)
def test_each_kernel_fits_the_card(arch: int, options: list[str], tmp_path: Path) -> None:
    """The program fails if a kernel has no config without spilled registers, within the card's
    shared memory, or if a large product is not one instruction."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for.py")), str(arch), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=7200 if "-v" in options else 1200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count(" registers") >= 49


def compiled(
    kernel: str = "kernel",
    *,
    spilled: int = 0,
    shared: int = 0,
    product: str = "",
    rows: int = 0,
    barriers: int = 0,
) -> Compiled:
    return Compiled(kernel, triton.Config({}), 99, spilled, shared, product, rows, barriers)


@pytest.mark.parametrize(
    ("arch", "shared", "is_left_out"),
    [
        (80, 163 << 10, False),
        (80, (163 << 10) + 1, True),
        (90, 227 << 10, False),
        (100, (227 << 10) + 1, True),
        (120, 99 << 10, False),
        (120, 100 << 10, True),
    ],
)
def test_shared_memory_of_the_cards(arch: int, shared: int, is_left_out: bool) -> None:
    assert compiled(shared=shared).is_left_out(arch) == is_left_out


def test_what_is_a_fault() -> None:
    assert faults([compiled(spilled=4), compiled()], 90) == []
    [none_left] = faults([compiled(spilled=4), compiled(shared=300 << 10)], 90)
    assert none_left.startswith("no config is left")
    small, large = (compiled(product="mma", rows=rows) for rows in (32, 64))
    assert faults([small], 90) == []
    assert faults([large], 80) == faults([large], 120) == []
    assert faults([large], 90)[0].startswith("wgmma is not used")
    assert faults([large], 100)[0].startswith("tcgen05 is not used")
    assert faults([compiled(product="wgmma", rows=64)], 90) == []
    assert faults([compiled(barriers=55), compiled("_sample", barriers=40)], 90) == []
    assert faults([compiled("_sample", barriers=41)], 90)[0].startswith("41 barriers")
    # What the tuner does not choose may be as it is.
    assert faults([compiled(), compiled(product="mma", rows=64, spilled=4)], 90) == []
