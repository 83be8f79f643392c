"""Compares Tandem's gRPC path with a raw byte stream between the same two processes.

grpc      from `FetchBlocks` until all bytes are in the consumer's pool, for n blocks scattered on
          both sides, within a whole real lease (ConsumerLease, PrefillService). Included: the
          producer's copy out of its pool, gRPC with Tandem's options, the consumer's copy
          into its pool, the answer to `release`. Not included: opening the lease (`lease_s` has
          it all). The pool is in memory that I/O and engine process both map, as a worker's is.
grpc_tls  the same, over connections with mutual TLS
grpc_raw  a stream of one message again and again, counted and dropped; no engine, no pool
grpc_raw_memory  the same of different messages, each ready: they come from memory, as blocks do

Four processes: an I/O and an engine process on either side, as of two workers; this process is
the consumer's I/O process. Only the engine is a stand-in (engine_stand_in.py).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import psutil

from tandem.cluster.launch.certificates import Authority
from tandem.common.perf_model.rates import WorkerRates
from tandem.common.sampling_params import SamplingParams
from tandem.engine.types import Mode, SequenceSpec
from tandem.errors import InternalError
from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.options import CHANNEL_OPTIONS
from tandem.net.rpc.peer_calls import PeerCalls
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.transfer.grpc.transport import GrpcTransport
from tandem.worker.engine_process.messages import Add, Remove
from tandem.worker.kv_pulls.lease import ConsumerLease
from tandem.worker.kv_pulls.puller import Puller
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.rates import Rates
from tandem_bench.grpc_worker import (
    RAW_METHOD,
    RAW_SERVICE,
    TOKEN,
    make_engine_link,
    worker_config,
)
from tandem_bench.pool import differing
from tandem_bench.sampling import in_turn, num_samples
from tandem_bench.sizes import Plan, scattered

RAW_MESSAGE_BYTES = 1 << 20
_DEADLINE_S = 60.0
_CHECKED_BLOCKS_MAX = 16


class _TimedTransport(GrpcTransport):
    """Knows when the first stream of the last pull was asked for."""

    fetch_started = 0.0

    def fetch(self, stream: int, request: pb.FetchBlocksRequest, deadline_s: float) -> Any:
        if stream == 0:
            self.fetch_started = time.perf_counter()
        return super().fetch(stream, request, deadline_s)


class GrpcBench:
    """Both workers; `start` first, `close` ends them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._config = worker_config("reader", plan.model, plan.layout.num_blocks)
        block_bytes = plan.layout.block_bytes
        self._rates = Rates(self._config, WorkerRates(block_bytes=block_bytes))
        self._names = itertools.count()
        self._lease_s: list[float] = []

    async def start(self) -> None:
        self._link = await make_engine_link(self._config)
        self._puller = Puller(self._config.transfer, self._link, spans=self._plan.layout.spans)
        self._tls = tempfile.TemporaryDirectory()
        Authority("bench").write(Path(self._tls.name), "worker")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tandem_bench.grpc_producer",
            self._plan.model,
            str(self._plan.layout.num_blocks),
            self._tls.name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        ready = await self._link.start()
        if not ready.pool_is_shared:
            raise InternalError("this system has no memory that two processes can map")
        async with asyncio.timeout(_DEADLINE_S):
            line = await self._process.stdout.readline()
        if not line:
            raise InternalError("the gRPC producer did not come up")
        address, by_tls = (f"127.0.0.1:{int(port)}" for port in line.split())
        self._clear = self._pair(address, PeerCalls("bench", TOKEN))
        self._encrypted = self._pair(by_tls, PeerCalls("bench", TOKEN, self._tls.name))
        self._raw_channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._raw = self._raw_channel.unary_stream(
            f"/{RAW_SERVICE}/{RAW_METHOD}", request_serializer=None, response_deserializer=None
        )

    async def row(self, num_blocks: int, repeats: int) -> dict[str, dict[str, float]]:
        """Figures of both methods for `num_blocks` blocks."""
        num_bytes = num_blocks * self._plan.layout.block_bytes

        async def ours() -> float:
            return await self._lease(self._clear, num_blocks, check=False)

        async def ours_by_tls() -> float:
            return await self._lease(self._encrypted, num_blocks, check=False)

        async def raw() -> float:
            return await self._read_raw(num_bytes, 1)

        async def raw_memory() -> float:
            return await self._read_raw(num_bytes, -(-num_bytes // RAW_MESSAGE_BYTES))

        await self._lease(self._encrypted, num_blocks, check=True)
        await self._lease(self._clear, num_blocks, check=True)
        self._lease_s.clear()
        figures = await in_turn(
            {
                "grpc_raw": raw,
                "grpc": ours,
                "grpc_tls": ours_by_tls,
                "grpc_raw_memory": raw_memory,
            },
            samples=num_samples(repeats, num_blocks),
            num_bytes=num_bytes,
            pids=self._pids(),
        )
        figures["grpc"]["lease_s"] = float(f"{statistics.median(self._lease_s[1:]):.4g}")
        return figures

    async def close(self) -> None:
        for peer in (self._clear, self._encrypted):
            peer.close()
        await self._raw_channel.close(None)
        await self._link.stop()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._tls.cleanup()

    def _pair(self, address: str, calls: PeerCalls) -> Peer:
        channel = calls.open(address)
        stub = WorkerStub(channel)  # type: ignore[no-untyped-call]
        transport = _TimedTransport("source", address, self._link, self._config.transfer, calls)
        return Peer("source", "1", stub, channel, {"grpc": transport}, "grpc")

    async def _lease(self, peer: Peer, num_blocks: int, *, check: bool) -> float:
        layout = self._plan.layout
        spec = SequenceSpec(
            sequence_id=f"sequence-{next(self._names)}",
            token_ids=[1] * (num_blocks * layout.block_size),
            num_prompt_tokens=num_blocks * layout.block_size,
            mode=Mode.WAITING_FOR_REMOTE_KV,
            sampling=SamplingParams(temperature=0, max_tokens=1),
        )
        lease = ConsumerLease(peer, puller=self._puller, rates=self._rates, config=self._config)
        self._link.send(Add(spec))
        started = time.perf_counter()
        await lease.run(
            spec,
            request_id=spec.sequence_id,
            first_missing_block=0,
            targets=scattered(layout.num_blocks, seed=2)[:num_blocks],
            on_first_token=lambda token_id, stats: None,
        )
        ended = time.perf_counter()
        if check:
            await self._check(spec.sequence_id, min(num_blocks, _CHECKED_BLOCKS_MAX))
        self._link.send(Remove(spec.sequence_id))
        transport = peer.in_use
        assert isinstance(transport, _TimedTransport)
        if peer is self._clear:
            self._lease_s.append(ended - started)
        return ended - transport.fetch_started

    async def _read_raw(self, num_bytes: int, num_different: int) -> float:
        started = time.perf_counter()
        request = f"{num_bytes} {RAW_MESSAGE_BYTES} {num_different}".encode()
        received = 0
        async for message in self._raw(
            request, metadata=token_metadata(TOKEN), timeout=_DEADLINE_S
        ):
            received += len(message)
        if received != num_bytes:
            raise InternalError(f"a raw stream of {received} bytes, not {num_bytes}")
        return time.perf_counter() - started

    async def _check(self, sequence_id: str, num_blocks: int) -> None:
        total = self._plan.layout.num_blocks
        local_ids = scattered(total, seed=2)[:num_blocks]
        producer_ids = scattered(total, seed=1)[:num_blocks]
        data = await self._link.load_bytes(sequence_id, local_ids)
        blocks = np.frombuffer(data, np.uint8).reshape(num_blocks, -1)
        for block, producer_id in zip(blocks, producer_ids, strict=True):
            if differing(block, producer_id):
                raise InternalError(f"what came is not block {producer_id} of the producer")

    def _pids(self) -> list[int]:
        ours = psutil.Process()
        children = [each.pid for each in ours.children(recursive=True)]
        return [os.getpid(), *children]
