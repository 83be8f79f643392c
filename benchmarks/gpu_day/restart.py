"""Workers that are killed with `kill -9` while a peer reads their pool, and started again.

A bare pool takes more than half of the GPU's memory, so that its successor fits only when the peer
has unmapped it. The peer is this process; it disconnects after each kill. As a worker does, a
successor waits for the memory. The next process imports its modules while the last one still runs.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time

import torch

from benchmarks.gpu.transfer import DEADLINE_S, Device, Side, offer, read_offer
from benchmarks.gpu_day.parts import add_row
from tandem.transfer.reads.messages import (
    PeerConnected,
    PeerRank,
    Pull,
    Settled,
    TransferEvent,
)

_SHARE = 0.6  # of the GPU's memory
_KILLS = 10
_WAIT_S = 10.0  # as long as a successor waits for memory
_READ_BLOCKS = 64


def run(*, stand_in: bool) -> None:
    device = Device(stand_in=stand_in)
    num_read = device.rows[-1] if stand_in else _READ_BLOCKS
    reader = Side("reader", "cuda_ipc", device, num_read)
    num_kills = 2 if stand_in else _KILLS
    started_s: list[float] = []
    following = _start(stand_in)
    for number in range(num_kills):
        process, following = following, _start(stand_in)
        assert process.stdin is not None
        assert process.stdout is not None
        started = time.monotonic()
        process.stdin.write(b"\n")
        process.stdin.flush()
        readable, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        line = process.stdout.readline() if readable else b""
        if not line:
            break
        started_s.append(time.monotonic() - started)
        metadata, remote = read_offer(line)
        peer_id = f"killed-{number}"
        reader.thread.connect(peer_id, [PeerRank(metadata, remote)], "cuda_ipc")
        connected = _wait(reader, PeerConnected)
        assert isinstance(connected, PeerConnected)
        assert not connected.error, connected.error
        blocks = list(range(num_read))
        reader.thread.submit(Pull(f"pull-{number}", peer_id, blocks, blocks, 5.0, "cuda_ipc"))
        process.kill()
        process.wait()
        _wait(reader, Settled)
        reader.thread.disconnect(peer_id, "cuda_ipc")
        print(f"start {number + 1}: {started_s[-1]:.2f} s", flush=True)
    following.kill()
    following.wait()
    reader.thread.stop()
    if stand_in:
        assert reader.ipc.num_mappings == 0, "the memory of a killed process stays mapped"
    add_row(
        f"starts beside the peer of a killed process, {num_kills} times kill -9",
        ratio=len(started_s) / num_kills,
        goal=1.0,
        longest_s=max(started_s, default=None),
    )


def _wait(side: Side, kind: type[TransferEvent]) -> TransferEvent:
    while not isinstance(event := side.event(), kind):
        pass
    return event


def _start(stand_in: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.gpu_day.restart"]
    command += ["--stand-in"] if stand_in else []
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def hold(*, stand_in: bool) -> None:
    """Holds a pool that others can read, from the first line of standard input on."""
    device = Device(stand_in=stand_in)
    num_blocks = device.rows[-1]
    if device.is_cuda:
        block_bytes = device.pool(1)[0].numel()
        num_blocks = int(torch.cuda.mem_get_info()[1] * _SHARE) // block_bytes
        torch.cuda.empty_cache()
    sys.stdin.readline()
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            side = Side("holder", "cuda_ipc", device, num_blocks)
            break
        except torch.OutOfMemoryError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    print(offer(side, "cuda_ipc"), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    hold(stand_in="--stand-in" in sys.argv)
