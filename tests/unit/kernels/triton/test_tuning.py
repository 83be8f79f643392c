"""What tuning chooses, with stand-ins for a kernel and for the times of its configs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.runtime.autotuner import Autotuner

from tandem_kernels.triton import tuning
from tandem_kernels.triton.decode_attention import _attend_split
from tandem_kernels.triton.latent_prefill import _attend_latent_chunks
from tandem_kernels.triton.prefill_attention import _fits
from tandem_kernels.triton.tuning import TunedKernel, choices

CONFIGS = [triton.Config({"KEYS": keys}) for keys in (16, 32, 64, 128)]


class Kernel:
    """A compiled kernel whose configs spill as `spilled` says, by their KEYS."""

    arg_names = ("x", "DEVICE", "KEYS")

    def __init__(self, spilled: Mapping[int, int]) -> None:
        self.spilled = spilled
        self.compiled: list[int] = []
        self.launched: list[int] = []

    @staticmethod
    def fn() -> None:
        """Autotuner wants the Python function of a kernel."""

    def run(self, *args: Any, KEYS: int, warmup: bool, **named: Any) -> SimpleNamespace:  # noqa: N803
        (self.compiled if warmup else self.launched).append(KEYS)
        return SimpleNamespace(n_spills=self.spilled.get(KEYS, 0))


def chosen(
    monkeypatch: pytest.MonkeyPatch, times: Mapping[int, float], spilled: Mapping[int, int]
) -> Kernel:
    """Tunes a kernel over configs that take these times, and launches it once."""

    def bench(self: Autotuner, *args: Any, config: triton.Config, **meta: Any) -> list[float]:
        return [times[config.kwargs["KEYS"]]] * 3

    monkeypatch.setattr(Autotuner, "_bench", bench)
    target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=90))
    monkeypatch.setattr(tuning, "driver", SimpleNamespace(active=target))
    kernel = Kernel(spilled)
    fits = lambda config, arguments, arch: config.kwargs["KEYS"] < arch  # noqa: E731
    tuned = TunedKernel(kernel, CONFIGS, ["DEVICE"], fits)
    tuned.run(1, DEVICE="card", grid=(1,), warmup=False)
    return kernel


def test_a_config_that_spills_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {16: 3.0, 32: 2.0, 64: 1.0, 128: 0.1}
    kernel = chosen(monkeypatch, times, {64: 8})
    assert kernel.launched == [32]
    assert kernel.compiled == [16, 32, 64]  # 128 does not fit


def test_the_fastest_is_chosen_if_all_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {16: 3.0, 32: 2.0, 64: 4.0}
    assert chosen(monkeypatch, times, {16: 8, 32: 8, 64: 8}).launched == [32]


def test_a_config_that_needs_too_much_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton gives it an infinite time."""
    kernel = chosen(monkeypatch, {16: 3.0, 32: math.inf, 64: math.inf}, {16: 8})
    assert kernel.launched == [16]
    assert kernel.compiled == [16]


@pytest.mark.parametrize(
    ("arch", "wanted"),
    [(80, (True, False, False)), (90, (True, True, False)), (100, (True, True, True))],
)
def test_tiles_of_prefill_by_the_tensor_cores(arch: int, wanted: tuple[bool, ...]) -> None:
    tiles = ((64, 64, 128), (128, 128, 128), (128, 64, 256))
    found = tuple(
        _fits(triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=8), {"BLOCK_D": block_d}, arch)
        for rows, keys, block_d in tiles
    )
    assert found == wanted


def test_latents_of_512_have_no_tiles_of_64_rows() -> None:
    config = triton.Config({"ROWS": 64, "KEYS": 16}, num_warps=8)
    assert not _attend_latent_chunks._fits(config, {"BLOCK_RANK": 512}, 90)
    assert _attend_latent_chunks._fits(config, {"BLOCK_RANK": 256}, 90)


def test_choices_by_kernel_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    config = triton.Config({"KEYS": 64}, num_warps=4, num_stages=3)
    monkeypatch.setattr(_attend_split, "cache", {(4, 128, "card"): config})
    found = choices()
    assert found["_attend_split"] == {"(4, 128, 'card')": str(config)}
    assert "_attend_latent_chunks" in found
