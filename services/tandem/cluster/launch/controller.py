"""`tandem controller` runs the pool controller on an existing Ray cluster, such as KubeRay's.

  take the lease of the head -> connect to Ray -> start the controller -> renew the lease ...

The controller runs in this process. When the process ends, the workers and their agents continue.
A cluster has one active controller: if a second one starts, it gets a higher fencing number, and
Redis refuses all writes of the first one.

This program and all nodes need the cluster's variables in their environments
(common/config/cluster.py). While Ray has no head, workers continue as long as their nodes do.
"""

import logging
import os
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from tandem.cluster.launch.pool_option import PoolSize, as_mapping, labels_of
from tandem.cluster.pools import ClusterSpec, PoolCommand
from tandem.cluster.processes.head_lease import RENEW_INTERVAL_S, HeadLease
from tandem.cluster.processes.signals import Interrupted, stop_signals
from tandem.cluster.ray.node import NAMESPACE
from tandem.common.config.cluster import RUN_FOLDER_VARIABLE, ClusterConfig, Pool, Role
from tandem.common.options import Options, PositiveSeconds, Switch, Text
from tandem.errors import ConfigError
from tandem.net.observability.logs import configure_logging
from tandem.net.store.client import UNREACHABLE, wait_until_answers

log = logging.getLogger(__name__)

_LEASE_DEADLINE_S = 60.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions(Options):
    """`tandem controller` runs the pool controller on an existing Ray cluster."""

    pools: Text
    """JSON file that gives, for each pool, the command that starts a worker and the Ray resources
    of one worker."""
    num_prefill: Annotated[PoolSize, Parameter(name="--prefill")] = 1
    """Number of prefill workers of a new cluster. 2:gpu=H100 starts 2 on nodes with the label
    gpu=H100."""
    num_decode: Annotated[PoolSize, Parameter(name="--decode")] = 1
    """Number of decode workers of a new cluster."""
    ray_address: Text = "auto"
    """Address of Ray's head. auto: the Ray cluster that runs on this machine."""
    request_nodes: Switch = False
    """Ask Ray's autoscaler for enough nodes to run all workers of the pools."""
    drain_deadline_s: PositiveSeconds = 45.0
    """Seconds after which a draining worker is killed. It must be longer than the worker's own
    --drain-deadline."""


def run(options: ControllerOptions) -> int:
    """Runs until a stop signal. Returns the exit status. Raises ConfigError if it cannot start."""
    configure_logging("controller")
    cluster = ClusterConfig.from_environment()
    commands = _read_pools(options.pools)
    wait_until_answers(cluster.redis_url)
    lease = HeadLease(cluster.redis_url, cluster.cluster_id, socket.gethostname())
    with suppress(Interrupted), stop_signals():
        number = _take(lease)
        address, host_id = _connect(options.ray_address)
        spec = make_spec(options, cluster.cluster_id, commands, host_id=host_id, number=number)
        Path(spec.run_folder).mkdir(parents=True, exist_ok=True)
        from tandem.cluster.ray.controller import PoolController

        PoolController(spec)
        log.info("the pool controller has started (fencing number %d)", number)
        while _renew(lease, number, address):
            time.sleep(RENEW_INTERVAL_S)
        raise ConfigError(
            "this controller ends, because another `tandem controller` has taken over the pools of "
            "this cluster"
        )
    return 0


def make_spec(
    options: ControllerOptions,
    cluster_id: str,
    commands: dict[Role, PoolCommand],
    *,
    host_id: str,
    number: int,
) -> ClusterSpec:
    """Builds the spec for the controller. `host_id` is Ray's id of this node, `number` the fencing
    number of the lease."""
    sizes: dict[Pool, int] = {"prefill": options.num_prefill, "decode": options.num_decode}
    folder = os.environ.get(RUN_FOLDER_VARIABLE, str(Path(tempfile.gettempdir()) / "tandem"))
    return ClusterSpec(
        cluster_id=cluster_id,
        run_folder=folder,
        pools={pool: commands[pool] for pool in ("prefill", "decode")},
        wanted={pool: int(size) for pool, size in sizes.items()},
        cores=[],
        drain_deadline_s=options.drain_deadline_s,
        host_id=host_id,
        number=number,
        selectors={pool: as_mapping(labels_of(size)) for pool, size in sizes.items()},
        on_nodes=True,
        requests_nodes=options.request_nodes,
    )


def _read_pools(path: str) -> dict[Role, PoolCommand]:
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=dict[Role, PoolCommand])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--pools: the file {path} cannot be used: {error}") from None
    for role in ("prefill", "decode"):
        if role not in found or not found[role].command:
            raise ConfigError(f"--pools: {path} has no command for the {role} pool")
        if any(amount <= 0 for amount in found[role].resources.values()):
            raise ConfigError(f"--pools: {path}: the resources of the {role} pool must be above 0")
    return found


def _take(lease: HeadLease) -> int:
    give_up_at = time.monotonic() + _LEASE_DEADLINE_S
    while True:
        try:
            if number := lease.take():
                return number
            why = (
                "another `tandem controller` runs the pools of this cluster and renews its lease; "
                "stop it first"
            )
        except UNREACHABLE as error:
            why = f"Redis does not answer: {error}"
        if time.monotonic() > give_up_at:
            raise ConfigError(why)
        time.sleep(_RETRY_S)


def _renew(lease: HeadLease, number: int, address: str) -> bool:
    """Renews the lease. Returns False if a later controller has taken over. Returns True if Redis
    is unreachable."""
    try:
        return lease.renew(number, address)
    except UNREACHABLE as error:
        log.warning(
            "Redis does not answer (%s), so this controller cannot renew its lease on the "
            "cluster's pools. This controller ends if another controller takes over the pools",
            error,
        )
        return True


def _connect(address: str) -> tuple[str, str]:
    """Connects to Ray. Returns the address of its head and Ray's id of this node. Raises
    ConfigError."""
    import ray

    try:
        context = ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray-address {address}: Ray's head cannot be reached: {error}"
        ) from None
    return str(context.address_info["gcs_address"]), ray.get_runtime_context().get_node_id()
