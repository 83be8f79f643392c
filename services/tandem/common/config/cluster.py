"""Settings that all processes of a cluster share, and its environment variables."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tandem.common.options import arguments
from tandem.errors import ConfigError

Role = Literal["prefill", "decode"]
# The pool "grpc" has routers that serve only the public gRPC API, one on each host with a router.
Pool = Literal["router", "grpc", "prefill", "decode"]
SIZED_POOLS: tuple[Pool, ...] = ("router", "prefill", "decode")  # pools whose size operators set
ROUTER_POOLS: tuple[Pool, ...] = ("router", "grpc")
REDIS_URL_VARIABLE = "TANDEM_REDIS_URL"
# Prefix of environment variables with the Redis URL for one kind of process, such as
# TANDEM_REDIS_URL_OF_worker. The URLs differ, because each kind of process has its own Redis user.
# A launcher has all of them. It passes the URL for workers to each worker as REDIS_URL_VARIABLE.
REDIS_URL_OF_KIND = "TANDEM_REDIS_URL_OF_"
TOKEN_VARIABLE = "TANDEM_CLUSTER_TOKEN"
# Variable with the API key that commands send. For `tandem up`, it is also the key that the new
# cluster needs. Child processes do not get it.
API_KEY_VARIABLE = "TANDEM_API_KEY"
API_KEY_FILE_VARIABLE = "TANDEM_API_KEY_FILE"  # variable with the path of a file with the key
CLUSTER_ID_VARIABLE = "TANDEM_CLUSTER_ID"
# Signal to a router that will soon be stopped. The router continues to serve, but its readiness
# probe fails, so that no new clients connect.
LEAVE_SIGNAL = signal.SIGUSR1
# Variable with the path of the run folder, from which Ray's agents read the spec of their host.
RUN_FOLDER_VARIABLE = "TANDEM_RUN_FOLDER"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Settings that every process of one cluster shares."""

    cluster_id: Annotated[str, Parameter(env_var=CLUSTER_ID_VARIABLE)]
    """Name of the cluster. All of the cluster's keys in Redis contain this name."""
    redis_url: Annotated[str, Parameter(env_var=REDIS_URL_VARIABLE)] = field(repr=False)
    """URL of Redis, with its password."""
    token: Annotated[str, Parameter(env_var=TOKEN_VARIABLE)] = field(repr=False)
    """Token that authenticates calls between the processes of the cluster."""
    record_ttl_s: float = 5.0  # a worker whose record in Redis is older than this counts as dead
    record_interval_s: float = 1.0

    @classmethod
    def from_environment(cls) -> ClusterConfig:
        """Reads the settings from the environment. Raises ConfigError if a variable is missing, and
        names this variable."""
        values: dict[str, Any] = {}
        for argument in arguments(cls):
            for variable in argument.parameter.env_var or ():
                if not os.environ.get(variable):
                    raise ConfigError(f"the environment variable {variable} is not set")
                values[argument.keys[0]] = os.environ[variable]
        return cls(**values)
