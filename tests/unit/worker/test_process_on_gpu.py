"""The engine process's pool on a GPU, with a stand-in for the runner and for torch's allocator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.transfer.cuda_ipc import cuda
from tandem.transfer.protocol import PROBE_BYTES
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.process import EngineProcess

LAYOUT = KvLayout.of_one(BlockLayout(8, 1, 1, 4, 8, "float32"))


def process_on(device: str) -> Any:
    process: Any = object.__new__(EngineProcess)
    kv = SimpleNamespace(device=torch.device(device), data_ptr=lambda: 4096)
    process._runner = SimpleNamespace(kv=kv)
    process._engine = SimpleNamespace(layout=LAYOUT)
    return process


def test_probes_read_into_memory_of_the_pools_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[tuple[int, torch.device]] = []
    scratch = torch.zeros(1)

    def empty(num_bytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert dtype is torch.uint8
        allocated.append((num_bytes, device))
        return scratch

    monkeypatch.setattr(torch, "empty", empty)
    pool = process_on("cuda:1")._local_pool()
    assert (pool.memory, pool.device_id, pool.address) == ("VRAM", 1, 4096)
    assert pool.device_scratch == scratch.data_ptr()
    assert allocated == [(pool.scratch_bytes, torch.device("cuda:1"))]
    assert PROBE_BYTES - LAYOUT.block_bytes < pool.scratch_bytes <= PROBE_BYTES


def test_a_pool_in_host_memory_needs_nothing_of_a_device() -> None:
    pool = process_on("cpu")._local_pool()
    assert (pool.memory, pool.device_id, pool.device_scratch) == ("DRAM", 0, None)


@pytest.mark.parametrize(("device", "waits"), [("cuda:1", ["cuda:1"]), ("cpu", [])])
def test_a_destroyed_agents_copies_end_with_the_pools_gpu(
    device: str, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    process_on(device)._finish_copies()
    assert waited == waits


def test_probes_over_grpc_pass_through_the_pools_gpu() -> None:
    process = process_on("cuda:1")
    stored: list[bytes] = []
    process._bytes = SimpleNamespace(read_probe=bytes, write_probe=stored.append)
    sent: list[tuple[object, object]] = []
    process._send = lambda reply, data=None: sent.append((reply, data))
    process._apply(messages.LoadProbe(7, 3), [b""])
    process._apply(messages.StoreProbe(), [b"", b"abc"])
    assert sent == [(messages.BlockData(7, ""), bytes(3))]
    assert stored == [b"abc"]


def test_only_a_pool_on_a_gpu_is_shared_over_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CudaIpcDevice", lambda device: f"device {device}")
    assert process_on("cuda:1")._ipc_device() == "device cuda:1"
    assert process_on("cpu")._ipc_device() is None
