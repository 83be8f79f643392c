"""Settings of `tandem worker`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from tandem.common.config.cluster import ClusterConfig, Role
from tandem.common.config.engine import EngineConfig
from tandem.common.config.groups import LIFECYCLE, Own
from tandem.common.config.kv_events import KvEventOptions
from tandem.common.config.tls import TlsDir
from tandem.common.config.transfer import TransferConfig
from tandem.common.options import (
    Constant,
    Name,
    Options,
    Port,
    PositiveSeconds,
    Seconds,
    Text,
    by_comma,
    to_int,
)
from tandem.errors import ConfigError


def _parse_cores(text: str) -> tuple[int, ...]:
    return tuple(to_int(core) for core in text.split(",") if core)


@Parameter(name="*", group=LIFECYCLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(Options):
    """`tandem worker` runs one worker until it is drained. Its secrets come from the environment.

    The exit status is 0 after a drain, 1 when the engine ended or no more blocks can be pulled, and
    2 for wrong settings or a worker that does not fit the others, which no restart would mend.
    """

    role: Annotated[Role, Own]
    """Pool of the worker."""
    worker_id: Annotated[Text, Own] = ""
    """Name of the worker. Default: the role and a random number."""
    host: Annotated[str, Own] = "127.0.0.1"
    """Address at which routers and peers reach the worker."""
    port: Annotated[Port, Own] = 0
    """Port of gRPC. 0: chosen by the system."""
    metrics_port: Annotated[Port, Own] = 0
    """Port of metrics and probes. 0: chosen by the system."""
    tls_dir: TlsDir = ""
    start_deadline_s: Annotated[Seconds, Own] = 1800.0
    """Seconds for the model's download, conversion and loading."""
    cores: Annotated[tuple[int, ...], Own, by_comma("N,...", _parse_cores)] = ()
    """Cores to pin the engine to, such as 0 or 0,1. Default: any."""
    engine_hang_timeout_s: PositiveSeconds = 60.0
    """Seconds without a turn of a busy engine, after which the worker ends it and itself."""
    generation: Name = ""
    """Name that differs from that of the workers to be replaced, in an upgrade that changes KV."""
    drain_deadline_s: Seconds = 30.0
    """Seconds for live requests to migrate or end once the worker is told to stop."""
    engine: EngineConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    events: KvEventOptions = field(default_factory=KvEventOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(WorkerOptions):
    """The settings of one worker: an engine process and an I/O process, in one of the two pools."""

    cluster: Constant[ClusterConfig]

    def check_together(self) -> None:
        if "#" in self.worker_id:  # the prefix tree uses # in the names of a worker's tiers
            raise ConfigError(f"worker-id is {self.worker_id!r}; it must not have a '#'")
