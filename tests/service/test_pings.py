"""A stream to a process that is stopped ends: its kernel goes on to acknowledge what it gets."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc.aio
import pytest

from tandem.net.rpc.options import CHANNEL_OPTIONS

ENDS_WITHIN_S = 25.0  # a ping after 10 s, and 10 s for its answer

SERVER = """
import asyncio, grpc.aio
from tandem.net.rpc.options import SERVER_OPTIONS

async def stream(request, context):
    while True:
        yield b"x"
        await asyncio.sleep(0.1)

async def main():
    server = grpc.aio.server(options=SERVER_OPTIONS)
    method = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t", {"Stream": method})])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_stream_to_a_stopped_process_ends(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    address = f"127.0.0.1:{server.stdout.readline().strip()}"
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_stream("/t/Stream", bytes, bytes)(b"")
        assert await call.read() == b"x"
        server.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        async with asyncio.timeout(2 * ENDS_WITHIN_S):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await read_all(call)
        assert time.monotonic() - stopped_at < ENDS_WITHIN_S


async def read_all(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> None:
    while await call.read():
        pass
