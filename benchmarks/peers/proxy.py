"""Joins vLLM's two servers into one, as vLLM's own toy proxy server for NixlConnector does.

    python -m benchmarks.peers.proxy --port P --prefill URL --decode URL

POST /v1/completions: first to the prefill server with max_tokens=1, which answers where the KV
lies (kv_transfer_params); then, with that, to the decode server, whose stream goes to the client.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from tandem_bench.framework import options, run_main

WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def make_app(prefill_url: str, decode_url: str) -> FastAPI:
    app = FastAPI()
    prefill = httpx.AsyncClient(base_url=prefill_url, timeout=None)
    decode = httpx.AsyncClient(base_url=decode_url, timeout=None)

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        body = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": WANTED}
        first.pop("stream_options", None)
        answer = await prefill.post("/v1/completions", json=first, headers=headers)
        answer.raise_for_status()
        rest = {**body, "kv_transfer_params": answer.json()["kv_transfer_params"]}

        async def stream() -> AsyncIterator[bytes]:
            async with decode.stream(
                "POST", "/v1/completions", json=rest, headers=headers
            ) as response:
                response.raise_for_status()
                async for part in response.aiter_bytes():
                    yield part

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


@options
class Options:
    port: int
    prefill: str
    """URL of the server that computes prompts."""
    decode: str
    """URL of the server that decodes."""


def main(options: Options) -> None:
    app = make_app(options.prefill, options.decode)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    run_main(main)
