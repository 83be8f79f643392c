"""Memory that gRPC's core keeps for unauthenticated clients' headers ends one process in order, and
no other."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import grpc.aio
import httpx
import pytest

from tandem.net.rpc.tandem.v1 import inference_pb2, worker_pb2
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.cluster import free_port
from tests.harness.hpack import hpack_attack
from tests.harness.router_process import RouterProcess, started_router
from tests.harness.scripted_worker import Say, update

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

LIMIT = ("--grpc-memory", str(64 << 20))
DEADLINE_S = 30.0


def attack(router: RouterProcess, port: int) -> contextlib.AbstractContextManager[None]:
    return hpack_attack(
        port, is_over=lambda: router.process.returncode is not None, num_frames_max=4000
    )


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True


async def check_http_port(router: RouterProcess) -> None:
    """The HTTP port of a gRPC replica answers probes but serves no API."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.http_port}") as http:
        assert (await http.get("/health")).status_code == 200
        for path in ("/v1/models", "/load", "/version"):
            assert (await http.get(path)).status_code == 404, path
        body = {"prompt": "x", "max_tokens": 1}
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"):
            assert (await http.post(path, json=body)).status_code == 404, path


async def test_a_replica_ends_after_its_live_call_and_cuts_the_attack(tmp_path: Path) -> None:
    goes_on = asyncio.Event()

    async def slow(submit: worker_pb2.SubmitSequence, say: Say) -> None:
        say(update(submit, [1000]))
        await goes_on.wait()
        say(update(submit, [1000], "length"))

    async with started_router(tmp_path, "--api", "grpc", *LIMIT) as router:
        await check_http_port(router)
        router.worker.script = slow
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc_port}") as channel:
            request = inference_pb2.GenerateRequest(text="x", max_tokens=2)
            call = InferenceStub(channel).Generate(request)
            message = await call.read()
            flood = attack(router, router.grpc_port)
            await asyncio.to_thread(flood.__enter__)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    while await listens(router.grpc_port):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                    assert router.process.returncode is None
                    goes_on.set()
                    while message is not grpc.aio.EOF:
                        last = message
                        message = await call.read()
                    assert await router.process.wait() == 1
            finally:
                goes_on.set()
                await asyncio.to_thread(flood.__exit__, None, None, None)
            assert last.finish_reason == "length"
            assert await call.code() is grpc.StatusCode.OK
    said = (tmp_path / "router.log").read_text().splitlines()[-1]
    assert said.startswith("router-0: the memory of this process grew by ")
    assert said.endswith("the process drains and ends, so that it is started again")


async def test_an_endpoint_picker_ends_as_well(tmp_path: Path) -> None:
    port = free_port()
    options = ("--endpoint-picker", f"127.0.0.1:{port}", "--drain-deadline", "1", *LIMIT)
    async with started_router(tmp_path, *options) as router:
        flood = attack(router, port)
        await asyncio.to_thread(flood.__enter__)
        try:
            async with asyncio.timeout(DEADLINE_S):
                assert await router.process.wait() == 1
        finally:
            await asyncio.to_thread(flood.__exit__, None, None, None)
    assert "memory of this process grew by" in (tmp_path / "router.log").read_text()


async def test_a_process_that_grows_on_while_it_drains_ends_at_once() -> None:
    """A process that keeps growing is ended even if its drain never ends."""
    program = """
import threading
from tandem.router.memory_watch import MemoryWatch
MemoryWatch(32 << 20, lambda why: print(why, flush=True)).start()
held, pause = [], threading.Event()
while True:
    held.append(b"x" * (32 << 20))
    pause.wait(0.15)
"""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.count("--grpc-memory allows 32") == 1
    assert "this process ends now" in done.stderr


async def test_what_grows_while_the_model_is_loaded_counts() -> None:
    """Growth during this time does not raise the process's limit."""
    program = """
import os, threading
from tandem.router.memory_watch import MemoryWatch
watch = MemoryWatch(512 << 20, lambda why: os._exit(7))
watch.start()
held = b"x" * (480 << 20)
watch.rebase()
more = b"x" * (400 << 20)
threading.Event().wait(5)
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 7
