"""The documents' commands as a reader types them, on the cluster that the README starts.

Ports, traces and folders are replaced by this test's own (`substitute`), and so are sizes of what
takes long; nothing else is. Commands that cannot run here are checked by
tests/unit/docs/test_commands.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tandem.cluster.operate import differences
from tandem.models.source import resolve
from tests.harness.cluster import free_port, wait_for
from tests.harness.documents import ROOT, Command, commands
from tests.lora_adapters import write_adapter

BIN = Path(sys.executable).parent
START_DEADLINE_S = 180.0
COMMAND_DEADLINE_S = 120.0
STARTS, *REST = [command for command in commands() if command.is_run]
BOUNDED = '"max_tokens": 100, "kv_budget": {"tokens": 50'  # KV leaves the budget, but sooner
TRACES = {
    "mooncake_conversation_trace.jsonl": "mooncake_small.jsonl",
    "azure_llm_2023_conversation.csv": "azure_small.csv",
}


@dataclass(frozen=True, slots=True)
class Documented:
    """The cluster that `make up` starts."""

    adapter: Path  # of the model
    agents: Path  # the trace of agents that docs/simulator.md makes, but short
    http_port: int
    grpc_port: int
    admin_port: int
    admin_grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def is_whole(self) -> bool:
        """Returns whether the router is ready and every pool has its wanted size."""
        try:
            if httpx.get(f"{self.url}/ready", timeout=5).status_code != 200:
                return False
            pools = httpx.get(f"{self.admin_url}/v1/cluster", timeout=5).json()["pools"]
        except (httpx.TransportError, json.JSONDecodeError):
            return False
        sizes = {name: pool["wanted"] for name, pool in pools.items() if "wanted" in pool}
        return len(sizes) == 3 and not differences(pools, sizes)

    def substitute(self, command: Command) -> str:
        text = command.text.replace(".venv/bin/", "")
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.http_port}")
        text = text.replace("127.0.0.1:8002", f"127.0.0.1:{self.admin_port}")
        text = text.replace("/adapters/sql", str(self.adapter))
        text = text.replace("agents.jsonl", str(self.agents))
        for trace, small in TRACES.items():
            text = text.replace(trace, str(ROOT / "tests" / "data" / small))
        if command.words[0] == "curl":
            text = text.replace('"max_tokens": 2000, "kv_budget": {"tokens": 1024', BOUNDED)
            return text.replace("curl ", "curl -sS --fail-with-body ", 1)
        if command.needs_cluster:
            return f"{text} --url {self.url if command.words[1] == 'chat' else self.admin_url}"
        return text.replace("--day 50000", "--day 500")


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documented]:
    """Starts the cluster of `make up` by its recipe, without its installation, on free ports."""
    assert STARTS.words == ["make", "up"]
    folder = tmp_path_factory.mktemp("documents")
    write_adapter(folder / "adapter", resolve("smollm2").config)
    agents = folder / "agents.jsonl"
    make_trace = [
        sys.executable,
        *("-m", "benchmarks.simulator.agents_trace"),
        str(agents),
        "--requests",
        "60",
    ]
    subprocess.run(make_trace, cwd=ROOT, check=True, timeout=60)
    cluster = Documented(folder / "adapter", agents, *(free_port() for _ in range(4)))
    options = f"--port {cluster.http_port} --grpc-port {cluster.grpc_port} --kv-memory 67108864"
    options += f" --admin-port {cluster.admin_port} --admin-grpc-port {cluster.admin_grpc_port}"
    told = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "up", f"ARGS={options}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    recipe = told.stdout.splitlines()[-1].replace(".venv/bin/", f"{BIN}/")
    screen = folder / "screen"
    with screen.open("wb") as out:
        up = subprocess.Popen(["bash", "-c", recipe], cwd=ROOT, stdout=out, stderr=out)

        def is_up() -> bool:
            assert up.poll() is None, screen.read_text()
            return "ready after" in screen.read_text() and cluster.is_whole()

        try:
            wait_for(is_up, deadline_s=START_DEADLINE_S, what="the documented cluster")
            yield cluster
        finally:
            up.terminate()
            up.wait(60)


@pytest.mark.parametrize("command", REST, ids=str)
def test_a_command_does_what_its_page_says(
    documented: Documented, command: Command, tmp_path: Path
) -> None:
    if command.needs_cluster:  # the command before it may have changed a pool
        wait_for(documented.is_whole, deadline_s=START_DEADLINE_S, what="a whole cluster")
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", documented.substitute(command)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=COMMAND_DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"{command}: {time.monotonic() - began:.1f} s\n{done.stdout}")
    if "_lora_adapter" in command.text:
        assert done.stdout.startswith("Success")
    elif command.words[0] == "curl":
        answer = json.loads(done.stdout)
        assert any(answer.get(name) for name in ("choices", "status", "data", "content")), answer


@pytest.mark.parametrize("example", ["openai_client", "grpc_client"])
def test_an_example_prints_an_answer(documented: Documented, example: str) -> None:
    address = f"{documented.url}/v1"
    if example == "grpc_client":
        address = f"127.0.0.1:{documented.grpc_port}"
    done = subprocess.run(
        [sys.executable, f"docs/examples/{example}.py", address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=COMMAND_DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "prompt tokens" in done.stdout
