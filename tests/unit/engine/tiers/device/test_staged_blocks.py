"""Copies between a pool's blocks and host memory, on a device that makes them as late as it can."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.tiers.device.blocks import BlocksInPlace, Channel
from tandem.engine.tiers.device.cuda import CudaDevice
from tandem.engine.tiers.device.staged_blocks import RING_MAX, StagedBlocks
from tests.late_device import LateDevice

NUM_BLOCKS, BLOCK_BYTES = 40, 8


@pytest.fixture
def rows() -> torch.Tensor:
    """Returns a pool whose blocks are full of their own ids."""
    ids = torch.arange(NUM_BLOCKS, dtype=torch.uint8)
    return ids[:, None].expand(-1, BLOCK_BYTES).contiguous()


def channel_of(rows: torch.Tensor, device: LateDevice) -> Channel:
    return StagedBlocks(rows, device).open_channel()


def test_in_place_a_blocks_bytes_are_the_pools(rows: torch.Tensor) -> None:
    blocks = BlocksInPlace(rows.numpy())
    channel, mark = blocks.open_channel(), blocks.mark()
    assert np.shares_memory(channel.begin_out(3, mark, None)(), rows.numpy()[3])
    buffer = channel.buffer(4, None)
    buffer[:] = 99
    assert channel.begin_in(4, buffer, mark).query()
    assert rows[4].tolist() == [99] * BLOCK_BYTES


def test_a_block_is_copied_out_after_the_work_that_fills_it(rows: torch.Tensor) -> None:
    device = LateDevice()
    device.work.queue(lambda: rows[3].fill_(77))
    mark = StagedBlocks(rows, device).mark()
    device.work.queue(lambda: rows[3].fill_(88))  # of a later step, in a block that is freed
    data = channel_of(rows, device).begin_out(3, mark, None)()
    assert data.tolist() == [77] * BLOCK_BYTES


def test_a_block_is_copied_in_after_the_work_that_reads_it(rows: torch.Tensor) -> None:
    """A copy of a block that is evicted by then is still to be made when a load takes its place."""
    device = LateDevice()
    blocks = StagedBlocks(rows, device)
    device.work.queue(lambda: rows[5].copy_(rows[4]))
    channel, mark = blocks.open_channel(), blocks.mark()
    buffer = channel.buffer(4, None)
    buffer[:] = 99
    done = channel.begin_in(4, buffer, mark)
    assert not done.query()
    assert rows[4].tolist() == [4] * BLOCK_BYTES
    done.synchronize()
    assert (rows[4].tolist(), rows[5].tolist()) == ([99] * BLOCK_BYTES, [4] * BLOCK_BYTES)


def test_a_buffer_is_not_filled_again_before_its_copy_is_made(rows: torch.Tensor) -> None:
    device = LateDevice()
    channel, mark = channel_of(rows, device), device.mark()
    assert channel.num_at_once == RING_MAX
    for block_id in range(NUM_BLOCKS):
        buffer = channel.buffer(block_id, None)
        buffer[:] = 100 + block_id
        done = channel.begin_in(block_id, buffer, mark)
    done.synchronize()
    assert rows[:, 0].tolist() == [100 + block_id for block_id in range(NUM_BLOCKS)]


def test_bytes_stay_until_as_many_further_ones_are_taken(rows: torch.Tensor) -> None:
    device = LateDevice()
    channel, mark = channel_of(rows, device), device.mark()
    for first in range(0, 2 * RING_MAX, RING_MAX):
        ends = [channel.begin_out(first + i, mark, None) for i in range(RING_MAX)]
        taken = [end() for end in ends]
        assert [data[0] for data in taken] == list(range(first, first + RING_MAX))


def test_a_slot_that_the_device_reaches_needs_no_buffer(rows: torch.Tensor) -> None:
    device = LateDevice()
    channel, mark = channel_of(rows, device), device.mark()
    slots = device.host_pages(2 * BLOCK_BYTES).data.reshape(2, -1)
    slot = slots[0]
    assert channel.begin_out(7, mark, slot)() is slot
    assert slot.tolist() == [7] * BLOCK_BYTES
    assert channel.buffer(9, slot) is slot
    channel.begin_in(9, slot, mark).synchronize()
    assert rows[9].tolist() == [7] * BLOCK_BYTES


def fake_cuda(calls: list[str], error: int = 0) -> SimpleNamespace:
    """Returns what writes down the calls of torch.cuda; memory is registered with `error`."""

    class Event(SimpleNamespace):
        def record(self, stream: Any) -> None:
            self.of = stream if isinstance(stream, str) else "copies"
            calls.append(f"record {self.of}")

    @contextmanager
    def stream(_: object) -> Iterator[None]:
        calls.append("on copies")
        yield
        calls.append("off copies")

    def register(address: int, num_bytes: int, flags: int) -> int:
        calls.append(f"register {num_bytes}")
        return error

    def make_stream(_: torch.device) -> SimpleNamespace:
        return SimpleNamespace(wait_event=lambda event: calls.append(f"wait {event.of}"))

    cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=lambda error: f"error {error}",
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: calls.append("unregister"),
    )
    return SimpleNamespace(
        cudart=lambda: cudart,
        current_stream=lambda device: "engine",
        Event=Event,
        Stream=make_stream,
        stream=stream,
    )


def test_cudas_copies_are_between_an_event_of_the_engine_and_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch, "cuda", fake_cuda(calls))
    device = CudaDevice(torch.device("cpu"))
    target = torch.zeros(4)
    device.open_stream().copy(target, torch.ones(4), device.mark())
    assert calls == ["record engine", "on copies", "wait engine", "record copies", "off copies"]
    assert target.tolist() == [1.0] * 4


def test_host_memory_is_registered_for_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch, "cuda", fake_cuda(calls))
    data, is_device_accessible = CudaDevice(torch.device("cpu")).host_pages(1 << 12)
    assert is_device_accessible
    slot = data.reshape(4, -1)[1]
    del data
    assert calls == ["register 4096"]
    assert not slot.any()
    del slot
    assert calls == ["register 4096", "unregister"]


def test_memory_that_cuda_cannot_pin_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "cuda", fake_cuda([], error=2))
    with caplog.at_level(logging.WARNING):
        data, is_device_accessible = CudaDevice(torch.device("cpu")).host_pages(1 << 12)
    assert not is_device_accessible
    assert data.nbytes == 4096
    assert "CUDA cannot pin 4,096 bytes of host memory for KV tiers (error 2)" in caplog.text
