"""A worker that ends before it has joined."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.worker.engine_process import link as link_module
from tandem.worker.engine_process.program import start_program
from tandem.worker.lifecycle.servicer import Servicer
from tandem.worker.lifecycle.worker import Worker
from tests.harness.cluster import wait_for

CONFIG = WorkerConfig(
    role="decode",
    cluster=ClusterConfig(cluster_id="c", redis_url="redis://localhost", token="t"),
    engine=EngineConfig(model="m"),
    transfer=TransferConfig(),
    worker_id="w",
)


def engines() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children()
        if "tests.harness.silent_engine" in (process.as_dict(["cmdline"])["cmdline"] or ())
    ]


@pytest.mark.parametrize("when", ["before its engine is there", "while its engine loads"])
async def test_one_that_is_stopped_while_its_model_loads_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    start_silent = partial(start_program, "tests.harness.silent_engine")
    monkeypatch.setattr(link_module, "start_program", start_silent)
    worker = Worker(CONFIG, Servicer)
    async with asyncio.timeout(60):
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(0)
        if when == "while its engine loads":
            await asyncio.to_thread(wait_for, engines, deadline_s=30, what="the engine process")
        worker.stop(30.0)
        stopped_at = time.monotonic()
        await running  # in order: it raises nothing
    assert time.monotonic() - stopped_at < 4, "it asked an engine that does not listen"
    assert worker.state == "starting"
    assert engines() == []


def test_one_whose_pool_does_not_fit_says_so_in_one_line() -> None:
    """It has not looked for Redis by then: nothing listens there."""
    settings = {"CLUSTER_ID": "c", "REDIS_URL": "redis://127.0.0.1:1", "CLUSTER_TOKEN": "t"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tandem.worker", "--role", "decode", "--model", "smollm2"),
            *("--device", "cpu", "--kv-memory", "900000000000"),
        ],
        env={**os.environ, **{f"TANDEM_{name}": value for name, value in settings.items()}},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert "--kv-memory 900000000000: a worker needs 900.0 GB pool + " in line
    assert done.returncode == 2
