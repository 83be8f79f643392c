"""Measures reads between the KV pools of two processes on one GPU, over CUDA IPC or NIXL.

    python -m benchmarks.gpu.transfer       one CUDA device, from the root

ours  `TransferThread.submit` until its `Settled` is here: n blocks of Llama 3 8B's shape,
      scattered on both sides, each checked afterwards
copy  as many bytes from one contiguous buffer of this process to another, on the device

Writes benchmarks/results/gpu_transfer.json. With --stand-in, a device in shared memory takes the
place of the GPU, and the figures mean nothing.
"""

from __future__ import annotations

import base64
import itertools
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from cyclopts import Parameter
from msgspec.structs import replace

from tandem.common.config.transfer import TransferConfig
from tandem.engine.cache.layout.pool_memory import create_shared, size_shared
from tandem.transfer.cuda_ipc.cuda import CudaIpcDevice
from tandem.transfer.reads.messages import (
    LocalPool,
    PeerConnected,
    PeerRank,
    ProducerReady,
    Pull,
    RemotePool,
    Settled,
    TransferEvent,
)
from tandem.transfer.thread import TransferThread
from tandem_bench.framework import RESULTS, options, run_main, write
from tandem_bench.shared_memory_device import SharedMemoryDevice
from tandem_bench.sizes import layout_of, scattered

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
DEADLINE_S = 60.0
_HEAD_BYTES = 4096  # the first bytes of a block tell it from all others


class Device:
    """The GPU, or shared memory in its place."""

    def __init__(self, *, stand_in: bool) -> None:
        self.is_cuda = not stand_in
        self.torch = torch.device("cuda" if self.is_cuda else "cpu")
        self.model = "Llama-3-8B" if self.is_cuda else "SmolLM2-135M"
        self.rows = ROWS if self.is_cuda else (1, 4)

    def pool(self, num_blocks: int) -> tuple[torch.Tensor, LocalPool, Any]:
        """Returns the memory of a pool [num_blocks, block_bytes], its description, and the device
        that shares it over CUDA IPC."""
        layout = layout_of(self.model, num_blocks)
        if self.is_cuda:
            memory = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8, device="cuda")
            ipc: Any = CudaIpcDevice(memory.device)
        else:
            fd = create_shared()
            assert fd is not None
            pages = np.frombuffer(size_shared(os.dup(fd), layout.pool_bytes), np.uint8)
            memory = torch.from_numpy(pages).view(num_blocks, -1)
            ipc = SharedMemoryDevice(fd, pages)
        self.wait()
        kind = "VRAM" if self.is_cuda else "DRAM"
        return memory, LocalPool(memory.data_ptr(), memory.numel(), 0, kind, layout), ipc

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def set(self) -> None:
        if self.is_cuda:
            torch.cuda.set_device(0)


class Side:
    """The pool of one of the two processes, and its transfer thread."""

    def __init__(self, name: str, transport: str, device: Device, num_blocks: int) -> None:
        self.memory, pool, self.ipc = device.pool(num_blocks)
        self._scratch = torch.empty(pool.scratch_bytes, dtype=torch.uint8, device=device.torch)
        if device.is_cuda:
            pool = replace(pool, device_scratch=self._scratch.data_ptr())
        self.events: SimpleQueue[TransferEvent] = SimpleQueue()
        config = TransferConfig(transport=transport)  # type: ignore[arg-type]
        self.thread = TransferThread(
            pool, config, name, self.events.put, device.set, device.wait, self.ipc
        )
        self.thread.start()

    def event(self) -> TransferEvent:
        return self.events.get(timeout=DEADLINE_S)


def content(num_blocks: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns the first bytes of the producer's blocks: other pseudo-random bytes for each."""
    ids = torch.arange(num_blocks, device=device)[:, None]
    places = torch.arange(num_bytes, device=device)[None, :]
    return ((ids * 7919 + places * 31 + places // 257) % 251).to(torch.uint8)


def produce(transport: str, device: Device) -> None:
    """Serves a pool until standard input closes. Prints one line that says how to read it."""
    side = Side("bench-source", transport, device, device.rows[-1])
    num_blocks = len(side.memory)
    side.memory[:] = content(num_blocks, 1, device.torch)
    side.memory[:, :_HEAD_BYTES] = content(num_blocks, _HEAD_BYTES, device.torch)
    device.wait()
    print(offer(side, transport), flush=True)
    sys.stdin.read()
    side.thread.stop()


def offer(side: Side, transport: str) -> str:
    """Returns a line that says how another process reads the pool."""
    side.thread.producer(1)
    ready = side.event()
    assert isinstance(ready, ProducerReady)
    metadata = ready.cuda_ipc if transport == "cuda_ipc" else ready.metadata
    assert metadata, ready.cuda_ipc_error or ready.error
    return base64.b64encode(msgspec.msgpack.encode((metadata, ready.pool))).decode()


def read_offer(line: bytes) -> tuple[bytes, RemotePool]:
    """Returns the metadata and the description of the pool that a line of `offer` has."""
    return msgspec.msgpack.decode(base64.b64decode(line), type=tuple[bytes, RemotePool])


@contextmanager
def producer(transport: str, *, stand_in: bool) -> Iterator[tuple[bytes, RemotePool]]:
    """Starts the other process. Yields the metadata and the description of its pool."""
    command = [sys.executable, "-m", "benchmarks.gpu.transfer", "--producer"]
    command += ["--transport", transport, *(["--stand-in"] if stand_in else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        line = process.stdout.readline() if readable else b""
        if not line:
            raise RuntimeError("the producer did not come up")
        yield read_offer(line)
    finally:
        process.stdin.close()
        process.wait(DEADLINE_S)


def measure_reads(
    transport: str,
    device: Device,
    *,
    repeats: int,
    on_row: Callable[[dict[str, float]], object] = print,
) -> list[dict[str, float]]:
    """Returns the times of reads and copies of as many bytes, and calls `on_row` with each."""
    side = Side("bench-reader", transport, device, device.rows[-1])
    with producer(transport, stand_in=not device.is_cuda) as (metadata, remote):
        side.thread.connect("source", [PeerRank(metadata, remote)], transport)
        connected = side.event()
        assert isinstance(connected, PeerConnected)
        assert not connected.error, connected.error
        num_blocks = len(side.memory)
        theirs, here = scattered(num_blocks, seed=1), scattered(num_blocks, seed=2)
        source = torch.zeros_like(side.memory)
        numbers = itertools.count()
        rows = []
        for n in device.rows:
            read = partial(_read, side, theirs[:n], here[:n], transport, numbers)
            read()
            ours_s = statistics.median(read() for _ in range(repeats))
            check(side.memory, theirs[:n], here[:n])
            side.memory.zero_()
            copy = partial(_copy, source[:n], side.memory[:n], device)
            copy()
            copy_s = statistics.median(copy() for _ in range(repeats))
            rows.append(
                {
                    "blocks": n,
                    "bytes": n * side.memory.shape[1],
                    "ours_s": ours_s,
                    "copy_s": copy_s,
                }
            )
            on_row(rows[-1])
        side.thread.stop()
    return rows


def _read(
    side: Side, theirs: list[int], here: list[int], transport: str, numbers: Iterator[int]
) -> float:
    pull = Pull(f"pull-{next(numbers)}", "source", theirs, here, DEADLINE_S, transport)
    started = time.perf_counter()
    side.thread.submit(pull)
    event = side.event()
    took_s = time.perf_counter() - started
    assert isinstance(event, Settled)
    assert event.result.done, event.result.error
    return took_s


def _copy(source: torch.Tensor, target: torch.Tensor, device: Device) -> float:
    started = time.perf_counter()
    target.copy_(source)
    device.wait()
    return time.perf_counter() - started


def check(memory: torch.Tensor, theirs: list[int], here: list[int]) -> None:
    """Raises RuntimeError if a block is not the one that was asked for."""
    num_blocks = len(memory)
    head = content(num_blocks, _HEAD_BYTES, memory.device)
    body = content(num_blocks, 1, memory.device)
    for source, target in zip(theirs, here, strict=True):
        block = memory[target]
        same = torch.equal(block[:_HEAD_BYTES], head[source])
        if not same or bool((block[_HEAD_BYTES:] != body[source]).any()):
            raise RuntimeError(f"block {target} is not block {source} of the other process")


def tell(row: dict[str, float]) -> None:
    print(
        f"{row['blocks']:5} blocks {row['bytes'] / 1e6:9.1f} MB"
        f"   ours {row['ours_s'] * 1e3:8.3f} ms {row['bytes'] / row['ours_s'] / 1e9:8.1f} GB/s"
        f"   copy {row['copy_s'] * 1e3:8.3f} ms"
    )


@options
class Options:
    producer: Annotated[bool, Parameter(show=False)] = False
    transport: str = "cuda_ipc"
    """cuda_ipc or nixl."""
    repeats: int = 11
    stand_in: bool = False
    """Use shared memory in place of a GPU."""
    out: Path = RESULTS / "gpu_transfer.json"


def main(options: Options = Options()) -> None:
    if not (options.stand_in or torch.cuda.is_available()):
        sys.exit("no CUDA device")
    device = Device(stand_in=options.stand_in)
    if options.producer:
        produce(options.transport, device)
        return
    rows = measure_reads(options.transport, device, repeats=options.repeats, on_row=tell)
    if device.is_cuda:
        card = torch.cuda.get_device_name()
        result = {"device": card, "transport": options.transport, "rows": rows}
        write(options.out, {**result, "torch": torch.__version__})


if __name__ == "__main__":
    run_main(main)
