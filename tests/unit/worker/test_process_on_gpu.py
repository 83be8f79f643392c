"""The transfers of a pool on a GPU, with stand-ins for the pool and for torch's allocator."""

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
from tandem.worker.engine_process.pool_transfers import PoolTransfers
from tandem.worker.engine_process.process import EngineProcess

LAYOUT = KvLayout.of_one(BlockLayout(8, 1, 1, 4, 8, "float32"))


def transfers_on(device: str) -> PoolTransfers:
    kv: Any = SimpleNamespace(device=torch.device(device), data_ptr=lambda: 4096)
    return PoolTransfers(kv, LAYOUT)


SCRATCH = torch.zeros(1)


@pytest.fixture(autouse=True)
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.device]]:
    """Sizes and devices of the scratch memory, which is SCRATCH instead."""
    found: list[tuple[int, torch.device]] = []

    def empty(num_bytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert dtype is torch.uint8
        found.append((num_bytes, device))
        return SCRATCH

    monkeypatch.setattr(torch, "empty", empty)
    return found


def test_probes_read_into_memory_of_the_pools_gpu(
    allocated: list[tuple[int, torch.device]],
) -> None:
    pool = transfers_on("cuda:1").pool
    assert (pool.memory, pool.device_id, pool.address) == ("VRAM", 1, 4096)
    assert pool.device_scratch == SCRATCH.data_ptr()
    assert allocated == [(pool.scratch_bytes, torch.device("cuda:1"))]
    assert PROBE_BYTES - LAYOUT.block_bytes < pool.scratch_bytes <= PROBE_BYTES


def test_a_rank_with_a_pool_of_its_own_has_its_heads_only() -> None:
    two_heads = KvLayout.of_one(BlockLayout(8, 2, 1, 4, 8, "float32"))
    kv: Any = SimpleNamespace(device=torch.device("cpu"), data_ptr=lambda: 4096)
    pool = PoolTransfers(kv, two_heads, rank=1, num_ranks=2).pool
    assert (pool.rank, pool.num_ranks, pool.num_bytes) == (1, 2, two_heads.pool_bytes // 2)
    assert pool.remote().spans == LAYOUT.spans


def test_a_pool_in_host_memory_needs_nothing_of_a_device() -> None:
    pool = transfers_on("cpu").pool
    assert (pool.memory, pool.device_id, pool.device_scratch) == ("DRAM", 0, None)


@pytest.mark.parametrize(("device", "waits"), [("cuda:1", ["cuda:1"]), ("cpu", [])])
def test_a_destroyed_agents_copies_end_with_the_pools_gpu(
    device: str, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    transfers_on(device).finish_copies()
    assert waited == waits


def test_probes_over_grpc_pass_through_the_pools_gpu() -> None:
    process: Any = object.__new__(EngineProcess)
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
    assert transfers_on("cuda:1").ipc_device() == "device cuda:1"
    assert transfers_on("cpu").ipc_device() is None
