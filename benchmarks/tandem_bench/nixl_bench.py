"""NIXL: Tandem's path against one raw read, and against memcpy, in this process's memory.

nixl         `TransferThread.submit` until its `Settled` is here: n blocks, scattered on both sides
nixl_raw     one NIXL read of the same bytes, contiguous, on a handle made before, polled without
             rest
nixl_blocks  one such read of the very same scattered blocks: what NIXL itself loses by them
memcpy       the same bytes from one buffer of this process to the other, by one thread

Each uses its buffers again and again, so that no page is new. A row that fits the caches is
faster than one that does not, whichever the method.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import select
import subprocess
import sys
import time
from queue import SimpleQueue

import msgspec
import numpy as np

from tandem.common.config.transfer import TransferConfig
from tandem.errors import InternalError
from tandem.transfer.nixl.agent import NixlAgent
from tandem.transfer.nixl.reach import host_identity
from tandem.transfer.reads.agent import ReadState
from tandem.transfer.reads.messages import (
    LocalPool,
    PeerConnected,
    PeerRank,
    Pull,
    RemotePool,
    Settled,
    TransferEvent,
)
from tandem.transfer.thread import TransferThread
from tandem_bench.pool import differing, pool_memory
from tandem_bench.sampling import cpu_seconds, in_turn, num_samples
from tandem_bench.sizes import Plan, scattered

_DEADLINE_S = 30.0
_PEER = "source"


class NixlBench:
    """A producer process, a transfer thread and a raw agent; `close` ends all of them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        layout = plan.layout
        command = [sys.executable, "-m", "tandem_bench.nixl_producer"]
        command += [plan.model, str(layout.num_blocks)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._blocks = pool_memory(layout)
        # Of its own: a copy into the pool would leave the raw read's target in the caches.
        self._copy_from = pool_memory(layout).reshape(-1)
        self._copy_to = pool_memory(layout).reshape(-1)
        self._producer_ids = scattered(layout.num_blocks, seed=1)
        self._local_ids = scattered(layout.num_blocks, seed=2)
        self._pull_ids = itertools.count()
        self._events: SimpleQueue[TransferEvent] = SimpleQueue()
        memory = self._blocks
        pool = LocalPool(memory.ctypes.data, memory.nbytes, 0, "DRAM", layout)
        self._thread = TransferThread(pool, TransferConfig(), "bench-reader", self._events.put)
        self._thread.start()
        try:
            metadata, self._remote = self._described()
            self._connect(metadata)
        except BaseException:
            self._end()
            raise
        self._raw = NixlAgent("bench-raw", mode=host_identity().mode, progress_delay_us=None)
        self._raw.register(
            address=memory.ctypes.data, num_bytes=memory.nbytes, device_id=0, memory="DRAM"
        )
        self._raw_peer = self._raw.add_peer(metadata)
        self._raw_lists = [
            self._raw.list_blocks(peer, blocks)
            for peer, blocks in (
                (self._raw_peer, self._remote.blocks()),
                (None, pool.remote().blocks()),
            )
        ]

    async def row(self, num_blocks: int, repeats: int) -> dict[str, dict[str, float]]:
        """Figures of the three methods for `num_blocks` blocks."""
        num_bytes = num_blocks * self._plan.layout.block_bytes
        handle = self._raw.create_read(
            self._raw_peer,
            producer=[(self._remote.address, num_bytes)],
            producer_device=("DRAM", 0),
            local=[(self._blocks.ctypes.data, num_bytes)],
            local_device=("DRAM", 0),
        )

        producer_list, local_list = self._raw_lists
        blocks_handle = self._raw.create_block_read(
            producer_list=producer_list,
            producer_ids=np.array(self._producer_ids[:num_blocks], np.int32),
            local_list=local_list,
            local_ids=np.array(self._local_ids[:num_blocks], np.int32),
        )

        async def ours() -> float:
            return self._pull(num_blocks)

        async def raw() -> float:
            return self._read_raw(handle)

        async def raw_blocks() -> float:
            return self._read_raw(blocks_handle)

        async def memcpy() -> float:
            started = time.perf_counter()
            np.copyto(self._copy_to[:num_bytes], self._copy_from[:num_bytes])
            return time.perf_counter() - started

        self._blocks[:] = 0
        self._pull(num_blocks)
        self._check(num_blocks)
        try:
            return await in_turn(
                # `nixl` and `nixl_blocks` move the same bytes. Each of them follows a method that
                # moves others, so neither finds its bytes in the caches.
                {"nixl_raw": raw, "nixl": ours, "memcpy": memcpy, "nixl_blocks": raw_blocks},
                samples=num_samples(repeats, num_blocks),
                num_bytes=num_bytes,
                pids=[os.getpid(), self._process.pid],
            )
        finally:
            self._raw.release(handle)
            self._raw.release(blocks_handle)

    async def idle_cpu_percent(self, during_s: float) -> float:
        """Returns the share of one core that both processes use with all agents connected and
        nothing to do."""
        pids = [os.getpid(), self._process.pid]
        before = cpu_seconds(pids)
        await asyncio.sleep(during_s)
        return 100 * (cpu_seconds(pids) - before) / during_s

    def close(self) -> None:
        for block_list in self._raw_lists:
            self._raw.release_list(block_list)
        self._raw.close()
        self._end()

    def _end(self) -> None:
        self._thread.stop()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _described(self) -> tuple[bytes, RemotePool]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _DEADLINE_S)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            raise InternalError("the NIXL producer did not come up")
        return msgspec.msgpack.decode(base64.b64decode(line), type=tuple[bytes, RemotePool])

    def _connect(self, metadata: bytes) -> None:
        self._thread.connect(_PEER, [PeerRank(metadata, self._remote)])
        event = self._events.get(timeout=_DEADLINE_S)
        assert isinstance(event, PeerConnected)
        if event.error:
            raise InternalError(f"NIXL cannot read here: {event.error}")

    def _pull(self, num_blocks: int) -> float:
        pull = Pull(
            f"pull-{next(self._pull_ids)}",
            _PEER,
            self._producer_ids[:num_blocks],
            self._local_ids[:num_blocks],
            _DEADLINE_S,
        )
        started = time.perf_counter()
        self._thread.submit(pull)
        event = self._events.get(timeout=_DEADLINE_S)
        elapsed_s = time.perf_counter() - started
        assert isinstance(event, Settled)
        if not event.result.done:
            raise InternalError(f"a pull failed: {event.result.error}")
        return elapsed_s

    def _read_raw(self, handle: int) -> float:
        started = time.perf_counter()
        state = self._raw.start(handle)
        while state is ReadState.UNDER_WAY:
            state = self._raw.state(handle)
        elapsed_s = time.perf_counter() - started
        if state is not ReadState.DONE:
            raise InternalError("a raw read failed")
        return elapsed_s

    def _check(self, num_blocks: int) -> None:
        pairs = zip(self._producer_ids[:num_blocks], self._local_ids, strict=False)
        for producer_id, local_id in pairs:
            if differing(self._blocks[local_id], producer_id):
                raise InternalError(f"block {local_id} is not block {producer_id} of the producer")
