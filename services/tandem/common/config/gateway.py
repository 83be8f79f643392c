"""Settings of a router behind a gateway of the Gateway API Inference Extension."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from tandem.common.config.groups import PROCESS
from tandem.common.options import Count, Options, Switch, Text, by_comma
from tandem.errors import ConfigError

_OBJECTIVE = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?)=(-?\d{1,9})")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+):(\d{1,5})")


def parse_objectives(text: str) -> dict[str, int]:
    """Parses NAME=PRIORITY,... such as chat=10,batch=-1. Raises ConfigError."""
    found: dict[str, int] = {}
    for entry in filter(None, text.split(",")):
        match = _OBJECTIVE.fullmatch(entry)
        if match is None or match[1] in found:
            raise ConfigError(
                f"objectives has the entry {entry!r}; an entry must be NAME=PRIORITY, such as "
                "batch=-1, and no NAME may occur twice"
            )
        found[match[1]] = int(match[3])
    return found


@Parameter(name="*", group=PROCESS)
@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions(Options):
    """Options that make a router an endpoint picker, or the front of one decode worker: it then
    takes a gateway's requests for this worker. By default, it is neither."""

    endpoint_picker: Text = ""
    """HOST:PORT at which this process chooses workers for a Kubernetes gateway (an endpoint picker
    of the Gateway API Inference Extension). The process then serves no public API. Default: off."""
    picker_fallbacks: Count = 2
    """Number of further endpoints that the endpoint picker names for a request. The gateway can
    send the request to a further endpoint if the first endpoint fails."""
    picker_stays: Switch = False
    """Let the gateway send both requests and answers through the endpoint picker. The picker then knows when a
    request ends. Without this option, only requests pass through the picker."""
    objectives: Annotated[Mapping[str, int], by_comma("NAME=PRIORITY,...", parse_objectives)] = (
        field(default_factory=dict)
    )
    """Priority of each InferenceObjective, such as batch=-1. Requests with a priority below 0 are
    refused (429) when workers are busy."""
    front_of: Text = ""
    """Id of the decode worker that this router stands in front of. If an endpoint picker has chosen
    that worker for a request, the router prefers that worker. Default: none; the router ignores the
    choices of endpoint pickers."""

    @property
    def is_router(self) -> bool:
        """True: the router serves clients directly. False: it is an endpoint picker or a front."""
        return not (self.endpoint_picker or self.front_of)

    def check_together(self) -> None:
        if self.endpoint_picker and self.front_of:
            raise ConfigError(
                "endpoint-picker and front-of cannot both be set, because an endpoint picker "
                "serves no requests; remove one of these options"
            )
        if self.endpoint_picker:
            self.picker_address()

    def picker_address(self) -> tuple[str, int]:
        """Returns the host and port of the endpoint picker. Raises ConfigError if the option is
        malformed."""
        match = _ADDRESS.fullmatch(self.endpoint_picker)
        if match is None or int(match[2]) > 65535:
            raise ConfigError(
                f"endpoint-picker has {self.endpoint_picker!r}; it must be HOST:PORT, such as "
                "0.0.0.0:9002"
            )
        return match[1], int(match[2])
