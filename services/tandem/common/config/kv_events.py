"""Settings of the KV events that a worker publishes for programs outside of the cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cyclopts import Parameter

from tandem.common.config.groups import KV_EVENTS
from tandem.common.options import Options, Text
from tandem.errors import ConfigError

_ENDPOINT = re.compile(r"tcp://.+:(\d+|\*)|ipc://.+")


@Parameter(name="*", group=KV_EVENTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventOptions(Options):
    """Settings of the KV events that a worker publishes over ZeroMQ, in the format of vLLM."""

    kv_events: Text = ""
    """Endpoint, such as tcp://*:5557 to listen, or tcp://HOST:5557 to connect. Default: none."""
    kv_events_replay: Text = ""
    """Endpoint to listen on for subscribers that ask for batches again. Default: none."""
    kv_events_model: Text = ""
    """Name of the model in the events' topic, kv@WORKER@MODEL. Default: the model's own name."""

    def check_together(self) -> None:
        for name in ("kv_events", "kv_events_replay"):
            endpoint = getattr(self, name)
            if endpoint and not _ENDPOINT.fullmatch(endpoint):
                option = name.replace("_", "-")
                raise ConfigError(
                    f"{option} is {endpoint!r}; it must be tcp://HOST:PORT or ipc://PATH"
                )
        if self.kv_events_replay and not self.kv_events:
            raise ConfigError("kv-events-replay needs kv-events, which it repeats")
