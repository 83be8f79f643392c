"""The check of a GPU's free memory at the start, with stand-ins for CUDA and the clock."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor import runner
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tests.tiny_models import make_tiny_model

GB = 10**9
CUDA = torch.device("cuda", 0)
WAIT_S = 60.0


class Gpu:
    """A GPU of 80 GB, of which `free_gb` are free until `free_at_s`, and 79 GB afterwards."""

    def __init__(self, free_gb: float, free_at_s: float = float("inf")) -> None:
        self.now = 100.0
        self.free_gb = free_gb
        self.full_until = self.now + free_at_s

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == CUDA
        free_gb = self.free_gb if self.now < self.full_until else 79.0
        return int(free_gb * GB), 80 * GB

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return make_tiny_model("llama", tmp_path)[0]


def check(
    gpu: Gpu,
    folder: ModelFolder,
    monkeypatch: pytest.MonkeyPatch,
    *,
    pool_gb: int,
    wait_s: float = WAIT_S,
) -> float:
    """Returns the seconds for which the check waited."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", gpu.mem_get_info)
    monkeypatch.setattr(runner, "time", gpu)
    config = EngineConfig(model="", device="cuda", kv_bytes_max=pool_gb * GB)
    started_at = gpu.now
    runner._check_memory(config, folder, CUDA, dtype="bfloat16", kernels="torch", gpu_wait_s=wait_s)
    return gpu.now - started_at


def test_a_gpu_with_enough_memory_is_taken_at_once(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert check(Gpu(79), folder, monkeypatch, pool_gb=60) == 0
    assert caplog.records == []


def test_the_memory_of_a_killed_worker_is_waited_for_with_one_line(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waited_s = check(Gpu(3.5, free_at_s=20), folder, monkeypatch, pool_gb=60)
    assert 20 <= waited_s <= 21
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "needs 60.0 GB of the GPU's memory, and 3.5 of 80.0 GB are free" in record.getMessage()
    assert "up to 60 s" in record.getMessage()


def test_a_gpu_that_stays_full_is_refused_after_the_limit(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(3.5)
    with pytest.raises(ConfigError, match=r"the GPU has 3\.5 GB free") as raised:
        check(gpu, folder, monkeypatch, pool_gb=60)
    assert "its peers keep its KV pool mapped until they are restarted" in raised.value.message
    assert "\n" not in raised.value.message
    assert WAIT_S <= gpu.now - 100 <= WAIT_S + 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("pool_gb", "wait_s"), [(90, WAIT_S), (60, 0.0)])
def test_what_never_fits_and_programs_without_a_limit_are_refused_at_once(
    pool_gb: int,
    wait_s: float,
    folder: ModelFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = Gpu(3.5)
    with pytest.raises(ConfigError, match=r"the GPU has 3\.5 GB free") as raised:
        check(gpu, folder, monkeypatch, pool_gb=pool_gb, wait_s=wait_s)
    assert gpu.now == 100
    assert ("mapped" in raised.value.message) == (pool_gb < 80)
    assert caplog.records == []
