"""Reads OpenTelemetry's environment variables: whether and how traces and metrics are sent over
OTLP.

OpenTelemetry calls traces a signal, and metrics another signal. A signal is on if
OTEL_EXPORTER_OTLP_ENDPOINT or the signal's own endpoint variable is set.

    variable                       effect
    OTEL_SDK_DISABLED=true         traces and metrics are off
    OTEL_TRACES_EXPORTER=none      traces are off
    OTEL_METRICS_EXPORTER=none     metrics are off

Source: OpenTelemetry's "Environment Variable Specification".
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast, get_args

from tandem.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

CLOSE_S = 2.0
Signal = Literal["TRACES", "METRICS"]
Protocol = Literal["grpc", "http/protobuf"]
_ENDPOINT, _PROTOCOL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"


def is_enabled(signal: Signal) -> bool:
    """Returns True if the environment variables turn this signal on."""
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return False
    if _variable(f"OTEL_{signal}_EXPORTER").lower() == "none":
        return False
    return bool(_variable(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or _variable(_ENDPOINT))


def protocol(signal: Signal) -> Protocol:
    """Reads the OTLP protocol of a signal. Raises ConfigError if the protocol is unknown."""
    named = _variable(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or _variable(_PROTOCOL) or "grpc"
    for known in get_args(Protocol):
        if named == known:
            return cast(Protocol, known)
    raise ConfigError(f"{_PROTOCOL} is {named!r}; it must be grpc or http/protobuf")


def make_resource(service: str, instance: str) -> Resource:
    """Builds the resource attributes for all signals of a process. OTEL_SERVICE_NAME overrides
    `service`."""
    from opentelemetry.sdk.resources import Resource

    named = _variable("OTEL_SERVICE_NAME") or service
    return Resource.create({"service.name": named, "service.instance.id": instance})


@contextmanager
def needs_sdk(what: str) -> Iterator[None]:
    """Converts the ImportError of a missing OpenTelemetry SDK to ConfigError."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{_ENDPOINT} turns on {what}, but the package {error.name} is not installed: "
            "pip install 'tandem-llm[otel]'"
        ) from error


def close_within(shutdown: Callable[[], object]) -> None:
    """Calls `shutdown`, which sends the remaining data. Returns after at most CLOSE_S seconds, even
    if `shutdown` is still running."""
    closing = threading.Thread(target=shutdown, daemon=True)
    closing.start()
    closing.join(CLOSE_S)


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
