"""A producer whose pool tests read over any transport.

`python -m tests.service.transfer_producer_process SEED` prints one line, base64 of its port and its
answer to `Connect`, and then one for each line that it reads: how many leases are open. It lives
until its standard input closes.

Real are the server, BlockServer, Leases and the NIXL producer. `Prefill` is a script: it announces
blocks of a scattered order in two runs, and goes on as a real producer does, up to the event that
the request's id names: `cut:EVENT` ends the stream after it, `hang:EVENT` says nothing more.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc.aio
import msgspec
import numpy as np

from tandem.common.config.transfer import TransferConfig
from tandem.engine.cache.layout.pool_memory import create_shared, size_shared
from tandem.net.rpc.auth import TokenInterceptor
from tandem.net.rpc.block_bytes import EncodedByHandler
from tandem.net.rpc.options import SERVER_OPTIONS
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.transfer.grpc.producer import BlockServer
from tandem.transfer.reads.messages import ProducerReady, TransferEvent
from tandem.transfer.thread import TransferThread
from tandem.worker.engine_process.pool_view import MappedPool
from tandem.worker.prefill.leases import Lease, Leases
from tandem_bench.shared_memory_device import SharedMemoryDevice
from tests.service.nixl_harness import DEADLINE_S, local_pool, transfer_config
from tests.service.transfer_harness import TOKEN, producer_block_ids
from tests.service.transfer_pools import contents, layout


class Producer(WorkerServicer):
    def __init__(self, memory: Any) -> None:
        self.leases = Leases(TransferConfig(), num_blocks=layout().num_blocks)
        owner: Any = SimpleNamespace(pool=MappedPool(memory, layout().spans))
        self._blocks = BlockServer(owner, self.leases.lent, lambda num_bytes: None)

    async def Prefill(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PrefillCommand], context: Any
    ) -> AsyncIterator[pb.PrefillEvent]:
        start = (await anext(request_iterator)).start
        how, _, last = start.request_id.partition(":")
        lease = Lease(start.lease_id, start.consumer_worker_id)
        self.leases.open(lease)
        try:
            async for event in self._events(start, lease, request_iterator):
                yield event
                if event.WhichOneof("event") == last:
                    if how == "hang":
                        await asyncio.Event().wait()
                    return
        finally:
            self.leases.close(lease)

    async def _events(
        self, start: pb.StartPrefill, lease: Lease, commands: AsyncIterator[pb.PrefillCommand]
    ) -> AsyncIterator[pb.PrefillEvent]:
        num_blocks = len(start.input.token_ids) // layout().block_size
        first = start.first_missing_block
        half = (first + num_blocks) // 2
        yield pb.PrefillEvent(accepted=pb.Accepted(epoch="e"))
        for begin, end in ((first, half), (half, num_blocks)):
            if begin == end:
                continue
            block_ids = producer_block_ids(num_blocks)[begin:end]
            lease.block_ids += block_ids
            yield pb.PrefillEvent(run=pb.BlockRun(first_block=begin, block_ids=block_ids))
        yield pb.PrefillEvent(prefilled=pb.Prefilled(first_token_id=1))
        assert (await anext(commands)).WhichOneof("command") == "release"
        released = pb.Released(epoch="e", lease_id=start.lease_id, whole=True)
        yield pb.PrefillEvent(released=released)

    async def FetchBlocks(  # noqa: N802
        self, request: pb.FetchBlocksRequest, context: Any
    ) -> AsyncIterator[bytes]:
        async for message in self._blocks.fetch(request, context):
            yield message

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> AsyncIterator[bytes]:  # noqa: N802
        async for message in self._blocks.probe(request, context):
            yield message


async def main() -> None:
    seed = int(sys.argv[1])
    fd = create_shared()
    assert fd is not None
    pages = size_shared(os.dup(fd), layout().pool_bytes)
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = contents(seed)
    answers: SimpleQueue[TransferEvent] = SimpleQueue()
    config = transfer_config()
    device = SharedMemoryDevice(fd, memory) if config.transport == "cuda_ipc" else None
    thread = TransferThread(
        local_pool(memory), config, f"producer-{seed}", answers.put, ipc_device=device
    )
    thread.start()
    thread.producer(1)
    ready = answers.get(timeout=DEADLINE_S)
    assert isinstance(ready, ProducerReady)
    pool = msgspec.msgpack.encode(ready.pool)
    offer = pb.ConnectResponse(
        epoch="e",
        nixl_metadata=ready.metadata,
        cuda_ipc_metadata=ready.cuda_ipc,
        pool=pool,
    )
    server = grpc.aio.server(
        interceptors=[TokenInterceptor(TOKEN), EncodedByHandler()], options=SERVER_OPTIONS
    )
    producer = Producer(memory)
    add_WorkerServicer_to_server(producer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    line = base64.b64encode(msgspec.msgpack.encode((port, offer.SerializeToString())))
    print(line.decode(), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(len(producer.leases), flush=True)
    await server.stop(None)
    thread.stop()


if __name__ == "__main__":
    asyncio.run(main())
