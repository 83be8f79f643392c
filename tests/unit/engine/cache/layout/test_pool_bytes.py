from __future__ import annotations

import pytest
import torch

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.layout.pool_bytes import PinnedPoolBytes, pool_bytes
from tandem.errors import InternalError


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_read_of_one_pool_is_written_to_another(dtype: str, device: str) -> None:
    layout = KvLayout.of_one(BlockLayout(6, 2, 3, 4, 8, dtype))
    producer = torch.randn(6, 2, 3, 2, 4, 8).to(getattr(torch, dtype)).to(device)
    target = torch.zeros_like(producer)
    data = pool_bytes(producer, layout).read([5, 0, 3])
    assert len(data) == 3 * layout.block_bytes
    pool_bytes(target, layout).write([1, 2, 4], bytes(data))
    assert torch.equal(target[[1, 2, 4]], producer[[5, 0, 3]])
    assert not target[[0, 3, 5]].any()


def test_bytes_that_are_not_whole_blocks_are_refused() -> None:
    layout = KvLayout.of_one(BlockLayout(2, 1, 1, 1, 4, "float32"))
    pool = pool_bytes(torch.zeros(2, 1, 1, 2, 1, 4), layout)
    with pytest.raises(InternalError, match="2 KV blocks have 64 bytes"):
        pool.write([0, 1], b"abc")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_probe_is_copied_from_and_to_the_device_and_leaves_the_pool_alone(device: str) -> None:
    layout = KvLayout.of_one(BlockLayout(2, 1, 1, 1, 4, "float32"))
    kv = torch.ones(2, 1, 1, 2, 1, 4, device=device)
    pool = pool_bytes(kv, layout)
    assert bytes(pool.read_probe(300)) == bytes(300)
    pool.write_probe(memoryview(b"abc"))
    assert bool((kv == 1).all())


def test_probes_of_a_gpus_pool_are_copies_between_the_gpu_and_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = KvLayout.of_one(BlockLayout(2, 1, 1, 1, 4, "float32"))
    pool = PinnedPoolBytes(torch.zeros(2, 1, 1, 2, 1, 4), layout)
    pool._device = torch.device("meta")  # no CUDA device is needed to see which one is used
    staged: list[torch.Tensor] = []
    copied: list[tuple[str, str]] = []

    def staging(num_bytes: int) -> torch.Tensor:
        staged.append(torch.empty(num_bytes, dtype=torch.uint8))
        return staged[-1]

    def copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copied.append((source.device.type, target.device.type))
        return target.zero_()

    def to(source: torch.Tensor, device: torch.device, **_: object) -> None:
        copied.append((source.device.type, device.type))

    monkeypatch.setattr(pool, "_staging", staging)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert bytes(pool.read_probe(3)) == bytes(3)
    pool.write_probe(b"abc")
    assert copied == [("meta", "cpu"), ("cpu", "meta")]
    assert bytes(staged[1].numpy()) == b"abc"
