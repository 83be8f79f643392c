"""Settings of `tandem worker`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from tandem.common.config.cluster import ClusterConfig, WorkerRole
from tandem.common.config.engine import EngineConfig
from tandem.common.config.groups import KV_EVENTS, LIFECYCLE, Own
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

_ENDPOINT = re.compile(r"tcp://.+:(\d+|\*)|ipc://.+")


@Parameter(name="*", group=KV_EVENTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventOptions(Options):
    """Settings of the KV events that a worker publishes over ZeroMQ, in the format of vLLM."""

    kv_events: Text = ""
    """Address for KV events: tcp://*:5557 listens, tcp://HOST:5557 connects. Default: off."""
    kv_events_replay: Text = ""
    """Address at which subscribers request missed KV events. Default: off."""
    kv_events_model: Text = ""
    """Model name in the topic kv@WORKER@MODEL of KV events. Default: the model's own name."""

    def check_together(self) -> None:
        for name in ("kv_events", "kv_events_replay"):
            endpoint = getattr(self, name)
            if endpoint and not _ENDPOINT.fullmatch(endpoint):
                option = name.replace("_", "-")
                raise ConfigError(
                    f"{option} is {endpoint!r}; it must be tcp://HOST:PORT or ipc://PATH"
                )
        if self.kv_events_replay and not self.kv_events:
            raise ConfigError(
                "kv-events-replay is set without kv-events, so there are no KV events to replay; "
                "set both, or neither"
            )


def _parse_cores(text: str) -> tuple[int, ...]:
    return tuple(to_int(core) for core in text.split(",") if core)


@Parameter(name="*", group=LIFECYCLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(Options):
    """`tandem worker` runs one worker until it is drained. Its secrets come from the environment.

    The exit status is 0 after a drain. It is 1 if the engine ended, the model was not loaded in
    time, or no KV blocks can be pulled any more. It is 2 if settings are wrong or incompatible with
    the other workers, or too little memory is free; a restart alone does not help then.
    """

    role: Annotated[WorkerRole, Own]
    """Pool that the worker joins: prefill, decode, or encode, whose workers compute images."""
    worker_id: Annotated[Text, Own] = ""
    """Name of the worker. Default: the role and a random number."""
    host: Annotated[str, Own] = "127.0.0.1"
    """Address at which routers and other workers reach the worker."""
    port: Annotated[Port, Own] = 0
    """Port of gRPC. 0: any free port."""
    metrics_port: Annotated[Port, Own] = 0
    """Port of metrics and probes. 0: any free port."""
    tls_dir: TlsDir = ""
    start_deadline_s: Annotated[Seconds, Own] = 1800.0
    """Longest time to download, convert and load the model, in seconds."""
    cores: Annotated[tuple[int, ...], Own, by_comma("N,...", _parse_cores)] = ()
    """CPU cores for the engine, such as 0 or 0,1. Default: all."""
    engine_hang_timeout_s: PositiveSeconds = 60.0
    """The worker ends if its engine has requests but computes nothing for this many seconds."""
    group: Annotated[Name, Own] = ""
    """Group of pools that the worker belongs to, if the cluster serves several models. Default: the
    group of the first model."""
    generation: Name = ""
    """A name of your choice for this worker's KV format. All running workers of one generation must
    have the same format; a worker with another format is refused. If an upgrade changes the format,
    give the new workers a new generation."""
    drain_deadline_s: Seconds = 30.0
    """Time in seconds that a stopping worker gives its running requests to finish or to move to
    other workers."""
    engine: EngineConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    events: KvEventOptions = field(default_factory=KvEventOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(WorkerOptions):
    """The settings of one worker: an engine process and an I/O process. An encode worker is
    one process."""

    cluster: Constant[ClusterConfig]

    def check_together(self) -> None:
        # The prefix tree names a worker's tier WORKER_ID#TIER.
        if "#" in self.worker_id:
            raise ConfigError(f"worker-id is {self.worker_id!r}; it must not contain '#'")
