"""What `tandem up` was asked for, and the commands of the processes that follow from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.cluster.pools import ClusterSpec, PoolCommand
from tandem.config import AutoscaleConfig, EngineConfig, Pool, TransferConfig
from tandem.errors import ConfigError

_PORT_MAX = 65535
LOCAL_COLD_START_S = 15.0  # of a worker whose model is on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Checked when made; raises ConfigError naming the option at fault."""

    model: str = "smollm2"
    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"  # of the two public ports
    http_port: int = 8000
    grpc_port: int = 8001
    redis_url: str = ""  # empty: an embedded server
    parent_pid: int | None = None  # its end is ours, too
    warm_blocks: int = 0  # that a new worker adopts from its peers
    engine: tuple[str, ...] = ()  # options of every worker, such as --dtype float32
    # what a worker makes of them
    engine_config: EngineConfig = field(default_factory=lambda: EngineConfig(model=""))
    transfer: tuple[str, ...] = ()  # more of them, such as --transport grpc
    router: tuple[str, ...] = ()  # options of every router, such as --ttft-limit 10

    def __post_init__(self) -> None:
        for name, port in (("--port", self.http_port), ("--grpc-port", self.grpc_port)):
            if not 1 <= port <= _PORT_MAX:
                raise ConfigError(f"{name} is {port}; allowed is 1 to {_PORT_MAX}")
        if self.http_port == self.grpc_port:
            raise ConfigError(f"--port and --grpc-port are both {self.http_port}; they must differ")
        for name, size in (("--prefill", self.num_prefill), ("--decode", self.num_decode)):
            if not 0 <= size <= 64:
                raise ConfigError(f"{name} is {size}; allowed is 0 to 64")

    @property
    def http_url(self) -> str:
        return f"http://{_reachable(self.host)}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{_reachable(self.host)}:{self.grpc_port}"


def check_worker_options(
    engine: Mapping[str, str | int | float], transfer: Mapping[str, str]
) -> EngineConfig:
    """A worker's settings. Raises ConfigError as a worker would, before anything is started."""
    TransferConfig(**{k.replace("-", "_"): v for k, v in transfer.items()})  # type: ignore[arg-type]
    names = {
        "kv-memory": "kv_bytes_max",
        "threads": "num_threads",
        "itl-target": "itl_target_s",
        "itl-limit": "itl_limit_s",
    }
    fields = {names.get(k, k.replace("-", "_")): v for k, v in engine.items()}
    for name in ("num_blocks", "max_tokens_per_step"):
        fields[name] = fields[name] or None  # type: ignore[assignment]
    return EngineConfig(model="", **fields)  # type: ignore[arg-type]


def autoscale_options(mode: str, size_max: int) -> list[str]:
    """Of a router on this machine. Raises ConfigError as it would."""
    AutoscaleConfig(mode=mode, prefill_max=size_max, decode_max=size_max)  # type: ignore[arg-type]
    options = {
        "": mode,
        "-prefill-max": size_max,
        "-decode-max": size_max,
        "-cold-start": LOCAL_COLD_START_S,
    }
    return [part for name, v in options.items() for part in (f"--autoscale{name}", str(v))]


def make_spec(
    options: LaunchOptions, *, cluster_id: str, run_folder: Path, model: Path
) -> ClusterSpec:
    """`model` is the folder that `options.model` was resolved to."""
    return ClusterSpec(
        cluster_id=cluster_id,
        run_folder=str(run_folder),
        pools={
            "router": _router(options, model),
            "prefill": _worker("prefill", options, model),
            "decode": _worker("decode", options, model),
        },
        wanted={"router": 1, "prefill": options.num_prefill, "decode": options.num_decode},
        cores=sorted(os.sched_getaffinity(0)),
    )


def _reachable(host: str) -> str:
    """The address to put in a URL for somebody on this machine."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _router(options: LaunchOptions, model: Path) -> PoolCommand:
    command = [sys.executable, "-m", "tandem.router", "--model", str(model)]
    command += ["--router-id", "{id}", "--host", options.host]
    command += ["--http-port", "{http_port}", "--grpc-port", "{grpc_port}"]
    command += options.router
    ports = {"http_port": options.http_port, "grpc_port": options.grpc_port}
    return PoolCommand(command, ports=ports)


def _worker(role: Pool, options: LaunchOptions, model: Path) -> PoolCommand:
    command = [sys.executable, "-m", "tandem.worker", "--role", role, "--worker-id", "{id}"]
    command += ["--model", str(model), "--cores", "{core}"]
    command += ["--warm-blocks", str(options.warm_blocks), *options.transfer, *options.engine]
    return PoolCommand(command, pinned=True)
