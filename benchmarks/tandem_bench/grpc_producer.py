"""The producer worker of the gRPC bench: the real PrefillService, and a raw stream beside it.

`python -m tandem_bench.grpc_producer MODEL NUM_BLOCKS [TLS_DIR]` prints the ports it listens on (in
clear text, and with mutual TLS if there is a folder) and lives until its standard input closes. No
registry, no router: the bench's process is the consumer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from tandem.net.rpc.auth import TokenInterceptor
from tandem.net.rpc.block_bytes import EncodedByHandler
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.rpc.options import SERVER_OPTIONS
from tandem.net.rpc.peer_calls import add_port
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.worker.engine_process.messages import Event, Report
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.parts import WorkerParts
from tandem.worker.peers.rates import Rates
from tandem.worker.prefill.service import PrefillService
from tandem_bench.grpc_worker import RAW_METHOD, RAW_SERVICE, TOKEN, make_engine_link, worker_config


class ProducerServicer(WorkerServicer):
    """The two calls of a lease, as services/tandem/worker/lifecycle/servicer.py delegates them."""

    def __init__(self, prefill: PrefillService) -> None:
        self._prefill = prefill

    async def Prefill(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PrefillCommand], context: Any
    ) -> AsyncIterator[pb.PrefillEvent]:
        async for event in self._prefill.serve(request_iterator, context):
            yield event

    async def FetchBlocks(  # noqa: N802
        self, request: pb.FetchBlocksRequest, context: Any
    ) -> AsyncIterator[bytes]:
        async for message in self._prefill.blocks.fetch(request, context):
            yield message


_messages: dict[int, list[bytes]] = {}  # by their size: made once, so that no page is new


async def raw_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    """`request` is "BYTES MESSAGE_BYTES NUM_DIFFERENT": that many bytes, of so many messages.

    One message again and again comes from the caches; bytes of a pool come from memory.
    """
    rest, message_bytes, num_different = (int(word) for word in request.split())
    ready = _messages.setdefault(message_bytes, [])
    for _ in range(num_different - len(ready)):
        ready.append(os.urandom(message_bytes))
    for number in itertools.count():
        if rest <= 0:
            return
        message = ready[number % num_different]
        yield message if rest >= message_bytes else message[:rest]
        rest -= message_bytes


async def run(model: str, num_blocks: int, tls_dir: str) -> None:
    config = worker_config("source", model, num_blocks)

    def on_event(event: Event) -> None:
        if isinstance(event, Report):  # none comes before the first command
            prefill.on_report(event)

    link = await make_engine_link(config, on_event)
    ready = await link.start()
    metrics = WorkerMetrics(worker_id=config.worker_id, role=config.role)
    rates = Rates(config, ready.rates)
    parts = WorkerParts(config, link, rates, metrics)
    prefill = PrefillService(parts, None, epoch="1", num_blocks=ready.num_blocks)
    interceptors = [TokenInterceptor(TOKEN), EncodedByHandler()]
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(ProducerServicer(prefill), server)  # type: ignore[no-untyped-call]
    handler = grpc.unary_stream_rpc_method_handler(raw_stream)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(RAW_SERVICE, {RAW_METHOD: handler}),)
    )
    ports = [
        add_port(server, "127.0.0.1:0", files)
        for files in ((None, CertificateFiles.in_folder(tls_dir)) if tls_dir else (None,))
    ]
    await server.start()
    print(*ports, flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await server.stop(None)
        await link.stop()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), "".join(sys.argv[3:4])))
