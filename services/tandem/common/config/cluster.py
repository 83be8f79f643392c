"""Settings that all processes of a cluster share, and its environment variables."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from tandem.common.options import arguments
from tandem.errors import ConfigError

# The roles of workers with KV. Such a worker can change its role.
Role = Literal["prefill", "decode"]
# An encode worker computes the embeddings of images. It has no KV and keeps its role.
WorkerRole = Literal["prefill", "decode", "encode"]
# The pool "grpc" has routers that serve only the public gRPC API, one on each host with a router.
Pool = Literal["router", "grpc", "prefill", "decode", "encode"]
# Name of a pool at the pool controller. The pools of the first model have the names of `Pool`. The
# pools of a further model have the name of its group before: `qwen.decode` (`pool_name`).
PoolName = str
# pools whose size operators set
SIZED_POOLS: tuple[Pool, ...] = ("router", "prefill", "decode", "encode")
WORKER_POOLS: tuple[Pool, ...] = ("prefill", "decode", "encode")
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


def pool_name(group: str, role: Pool) -> PoolName:
    """Returns the name of a pool of a model's group. `group` is empty for the first model."""
    return f"{group}.{role}" if group else role


def role_of(pool: PoolName) -> Pool:
    """Returns what the processes of a pool do: "decode" for `qwen.decode`."""
    name = pool.rpartition(".")[2]
    role: Pool = next(each for each in get_args(Pool) if each == name)
    return role


def is_pool(name: str) -> bool:
    """Returns whether this version knows the role of a pool. Processes of another version may have
    other roles."""
    return name.rpartition(".")[2] in get_args(Pool)


def group_of(pool: PoolName) -> str:
    """Returns the group of a pool: "qwen" for `qwen.decode`, and "" for `decode`."""
    return pool.rpartition(".")[0]


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
