"""The kernels compute the same bits, whether GCC or clang has compiled them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from tandem.engine.executor.native import decoder
from tandem_kernels.native import library
from tests.harness.wheel import ROOT
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.native_shapes import SHAPES, Shape
from tests.unit.kernels.state_cases import NUM_ROWS
from tests.unit.kernels.test_native_state import SHAPES as STATES
from tests.unit.kernels.test_native_state import SPANS, StateKernels, computed

# The set for which the build computes. More sets would take minutes each.
INSTRUCTIONS = "avx2"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def of_clang(tmp_path_factory: pytest.TempPathFactory) -> library.Library:
    """The kernels of this checkout, compiled by clang."""
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not installed")
    own = library.load()
    if own is None or own.instructions(INSTRUCTIONS) is None:
        pytest.skip(f"this processor or this build lacks {INSTRUCTIONS}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "clang++")
        patch.syspath_prepend(str(ROOT / "kernels"))
        patch.delitem(sys.modules, "native_build", raising=False)
        import native_build

        target: Path = tmp_path_factory.mktemp("clang") / "_decoder.so"
        native_build.build(target, [INSTRUCTIONS])
    return library.Library(target)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoders_are_equal(
    shape: Shape, of_clang: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = native_shapes.outputs(shape, INSTRUCTIONS)
    monkeypatch.setattr(decoder, "load", lambda: of_clang)
    theirs = native_shapes.outputs(shape, INSTRUCTIONS)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("name", STATES)
def test_states_are_equal(name: str, of_clang: library.Library) -> None:
    own = library.load()
    assert own is not None
    found = []
    for each in (own, of_clang):
        states = STATES[name].states.clone()
        y = computed(StateKernels(each, 1, INSTRUCTIONS), STATES[name], states, SPANS)
        found.append((y[:NUM_ROWS], states))
    assert all(map(torch.equal, *found))
