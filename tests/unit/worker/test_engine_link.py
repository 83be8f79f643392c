"""The link to an engine that does not start, ends, or cannot be told anything."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.errors import ConfigError, WorkerLost
from tandem.worker import __main__ as worker_main
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.program import start_program


def config(start_deadline_s: float) -> WorkerConfig:
    return WorkerConfig(
        role="decode",
        cluster=ClusterConfig(cluster_id="c", redis_url="redis://localhost", token="t"),
        engine=EngineConfig(model="m"),
        transfer=TransferConfig(),
        worker_id="w",
        start_deadline_s=start_deadline_s,
    )


def unheard() -> list[dict[str, Any]]:
    """Returns a list of what the event loop reports from now on: errors that nobody awaits."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    return reports


async def start(start_deadline_s: float, engine_module: str) -> None:
    link = EngineLink(config(start_deadline_s), "1", program=await start_program(engine_module))
    try:
        await link.start()
    finally:
        link.kill("the test is over")
        await link.stop()


async def test_an_engine_that_does_not_start_is_given_up_at_the_workers_deadline() -> None:
    reports = unheard()
    async with asyncio.timeout(60):
        with pytest.raises(
            WorkerLost, match=r"within 0\.2 s; if the model needs more time, raise --start-deadline"
        ):
            await start(0.2, "tests.harness.silent_engine")
    gc.collect()
    assert not reports


async def test_an_engine_waits_for_a_gpus_memory_up_to_the_hang_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[messages.EngineSettings] = []
    kind = messages.EngineSettings

    def settings(**fields: Any) -> messages.EngineSettings:
        sent.append(kind(**fields))
        return sent[-1]

    monkeypatch.setattr(messages, "EngineSettings", settings)
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost):
            await start(0.2, "tests.harness.silent_engine")
    (told,) = sent
    limits = {told.gpu_wait_s, told.engine.rank_stopped_s_max}
    assert limits == {config(0.2).engine_hang_timeout_s} == {60}


async def test_an_engine_that_ends_is_not_waited_for() -> None:
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost, match="the engine process ended: "):
            await start(3600, "tests.harness.no_such_engine")


def test_the_option_is_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLUSTER_ID", "REDIS_URL", "CLUSTER_TOKEN"):
        monkeypatch.setenv(f"TANDEM_{name}", "x")
    seen: list[WorkerConfig] = []

    async def run(config: WorkerConfig, engine_module: str) -> None:
        seen.append(config)

    monkeypatch.setattr(worker_main, "_run", run)
    monkeypatch.setattr("tandem.net.observability.logs.configure_logging", lambda process: None)
    command = ["tandem", "worker", "--role", "decode", "--model", "m"]
    for more in (["--start-deadline", "7"], []):
        monkeypatch.setattr("sys.argv", [*command[1:], *more])
        worker_main.main()
    assert [c.start_deadline_s for c in seen] == [7, 1800]
    with pytest.raises(ConfigError, match="start-deadline"):
        config(float("nan"))


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_only_decode_workers_load_a_draft_model(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    seen: list[WorkerConfig] = []
    for name in ("CLUSTER_ID", "REDIS_URL", "CLUSTER_TOKEN"):
        monkeypatch.setenv(f"TANDEM_{name}", "x")

    async def run(config: WorkerConfig, engine_module: str) -> None:
        seen.append(config)

    monkeypatch.setattr(worker_main, "_run", run)
    monkeypatch.setattr("tandem.net.observability.logs.configure_logging", lambda process: None)
    setting = '{"method": "draft_model", "model": "d", "num_speculative_tokens": 4}'
    command = ["worker", "--role", role, "--model", "m"]
    for given in (setting, "off"):
        monkeypatch.setattr("sys.argv", [*command, "--speculative-config", given])
        worker_main.main()
    used = {"decode": [setting, "off"], "prefill": ["auto", "off"]}[role]
    assert [each.engine.speculative_config for each in seen] == used


async def test_a_command_to_a_stopped_engine_is_dropped_in_silence() -> None:
    """The future of a send on a closed socket would fail, with nobody to hear of it."""
    link = EngineLink(config(1.0), "1")
    await link.stop()
    reports = unheard()
    link.send(messages.Remove("a"))
    gc.collect()
    assert not reports


async def test_an_engine_that_lacks_a_command_is_ended() -> None:
    link = EngineLink(config(1.0), "1")
    reports = unheard()
    no_bytes: Any = "text"  # which ZeroMQ does not send
    link.send(messages.Remove("a"), no_bytes)
    async with asyncio.timeout(5):
        assert "a command cannot be sent to the engine: TypeError" in await link.ended()
    await link.stop()
    gc.collect()
    assert not reports
