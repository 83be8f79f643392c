"""Measures NIXL between the KV pools of two processes on one GPU.

    python -m benchmarks.gpu.transfer       one CUDA device, from the root

ours  `TransferThread.submit` until its `Settled` is here: n blocks of Llama 3 8B's shape,
      scattered on both sides, each checked afterwards
copy  as many bytes from one contiguous buffer of this process to another, on the device

Writes benchmarks/results/gpu_transfer.json.
"""

from __future__ import annotations

import base64
import itertools
import select
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import msgspec
import torch
from cyclopts import Parameter
from msgspec.structs import replace

from tandem.common.config.transfer import TransferConfig
from tandem.transfer.reads.messages import (
    LocalPool,
    PeerConnected,
    ProducerReady,
    Pull,
    RemotePool,
    Settled,
    TransferEvent,
)
from tandem.transfer.thread import TransferThread
from tandem_bench.framework import RESULTS, options, run_main, write
from tandem_bench.sizes import layout_of, scattered

MODEL = "Llama-3-8B"
NUM_BLOCKS = 1024
ROWS = (1, 4, 16, 64, 256, 512, 1024)
DEADLINE_S = 60.0


def open_pool(
    name: str, with_context: bool
) -> tuple[list[torch.Tensor], TransferThread, SimpleQueue[TransferEvent]]:
    layout = layout_of(MODEL, NUM_BLOCKS)
    memory = torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    pool = LocalPool(memory.data_ptr(), memory.numel(), 0, "VRAM", layout)
    scratch = torch.empty(pool.scratch_bytes, dtype=torch.uint8, device="cuda")
    pool = replace(pool, device_scratch=scratch.data_ptr())
    events: SimpleQueue[TransferEvent] = SimpleQueue()
    use = partial(torch.cuda.set_device, 0) if with_context else None
    finish = torch.cuda.synchronize
    thread = TransferThread(pool, TransferConfig(), name, events.put, use, finish)
    thread.start()
    return [memory, scratch], thread, events


def content(num_blocks: int, block_bytes: int) -> torch.Tensor:
    """Returns the blocks of the producer: another pseudo-random content for each."""
    ids = torch.arange(num_blocks, device="cuda")[:, None]
    places = torch.arange(block_bytes, device="cuda")[None, :]
    return ((ids * 7919 + places * 31 + places // 257) % 251).to(torch.uint8)


def produce(with_context: bool) -> None:
    (memory, _scratch), thread, events = open_pool("bench-source", with_context)
    memory[:] = content(NUM_BLOCKS, 1)
    memory[:, :4096] = content(NUM_BLOCKS, 4096)
    torch.cuda.synchronize()
    thread.producer(1)
    ready = events.get(timeout=DEADLINE_S)
    assert isinstance(ready, ProducerReady)
    assert not ready.error, ready.error
    print(base64.b64encode(msgspec.msgpack.encode((ready.metadata, ready.pool))).decode())
    sys.stdout.flush()
    sys.stdin.read()
    thread.stop()


def consume(line: bytes, repeats: int, with_context: bool) -> list[dict[str, float]]:
    (memory, _scratch), thread, events = open_pool("bench-reader", with_context)
    metadata, remote = msgspec.msgpack.decode(base64.b64decode(line), type=tuple[bytes, RemotePool])
    thread.connect("source", metadata, remote)
    connected = events.get(timeout=DEADLINE_S)
    assert isinstance(connected, PeerConnected)
    assert not connected.error, connected.error
    theirs, here = scattered(NUM_BLOCKS, seed=1), scattered(NUM_BLOCKS, seed=2)
    numbers = itertools.count()
    rows = []
    source, target = torch.zeros_like(memory), torch.zeros_like(memory)
    for num_blocks in ROWS:
        ours, copies = [], []
        for _ in range(repeats):
            pull = Pull(
                f"pull-{next(numbers)}",
                "source",
                theirs[:num_blocks],
                here[:num_blocks],
                DEADLINE_S,
            )
            started = time.perf_counter()
            thread.submit(pull)
            event = events.get(timeout=DEADLINE_S)
            ours.append(time.perf_counter() - started)
            assert isinstance(event, Settled)
            assert event.result.done, event.result.error
            started = time.perf_counter()
            target[:num_blocks].copy_(source[:num_blocks])
            torch.cuda.synchronize()
            copies.append(time.perf_counter() - started)
        check(memory, theirs[:num_blocks], here[:num_blocks])
        memory.zero_()
        torch.cuda.synchronize()
        num_bytes = num_blocks * memory.shape[1]
        ours_s, copy_s = statistics.median(ours), statistics.median(copies)
        rows.append({"blocks": num_blocks, "bytes": num_bytes, "ours_s": ours_s, "copy_s": copy_s})
        print(
            f"{num_blocks:5} blocks {num_bytes / 1e6:9.1f} MB   ours {ours_s * 1e3:8.3f} ms"
            f" {num_bytes / ours_s / 1e9:8.1f} GB/s   copy {copy_s * 1e3:8.3f} ms"
        )
    thread.stop()
    return rows


def check(memory: torch.Tensor, theirs: list[int], here: list[int]) -> None:
    """Raises RuntimeError if a block is not the one that was asked for."""
    head, body = content(NUM_BLOCKS, 4096), content(NUM_BLOCKS, 1)
    for source, target in zip(theirs, here, strict=True):
        block = memory[target]
        if not torch.equal(block[:4096], head[source]) or (block[4096:] != body[source]).any():
            raise RuntimeError(f"block {target} is not block {source} of the other process")


@options
class Options:
    producer: Annotated[bool, Parameter(show=False)] = False
    repeats: int = 11
    without_context: bool = False
    """Give the transfer threads no CUDA context."""
    out: Path = RESULTS / "gpu_transfer.json"


def main(options: Options = Options()) -> None:
    if options.producer:
        produce(not options.without_context)
        return
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    command = [sys.executable, "-m", "benchmarks.gpu.transfer", "--producer"]
    if options.without_context:
        command.append("--without-context")
    source = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert source.stdin is not None
    assert source.stdout is not None
    try:
        readable, _, _ = select.select([source.stdout], [], [], DEADLINE_S)
        line = source.stdout.readline() if readable else b""
        if not line:
            sys.exit("the producer did not come up")
        rows = consume(line, options.repeats, not options.without_context)
    finally:
        source.stdin.close()
        try:
            source.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            source.kill()
            source.wait()
    write(options.out, {"device": torch.cuda.get_device_name(), "model": MODEL, "rows": rows})


if __name__ == "__main__":
    run_main(main)
