"""Starts one machine's Ray with few processes: a head or a joining node.

  python -m tandem.cluster.ray.node RUN_FOLDER NODE

NODE is a `RayNode` as JSON. The program prints what `start_ray` returns as JSON, and exits.

`ray start` would also start a dashboard server, an autoscaler monitor and a client server, and
listen on the machine's external address. This module uses Ray's class Node instead, which is not
public, so it may have to change with new versions of Ray.
"""

import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.config.cluster import RUN_FOLDER_VARIABLE

NAMESPACE = "tandem"
LISTENING = b"listening\n"  # printed by a starting head once GCS and raylet are up
_OBJECT_STORE_BYTES = 80 << 20  # smallest size that Ray accepts; Tandem stores nothing there

LOOPBACK = "127.0.0.1"
HOST_LABEL = "tandem-host"
NODE_LABEL = "ray.io/node-id"  # label that Ray itself sets on each node
CORES_LABEL = "tandem-cores"
GPUS_LABEL = "tandem-gpus"
NUMA_LABEL = "tandem-numa"
_LABEL_MAX = 63  # characters of a label value
_TOKEN_FILE = "ray.token"
# GCS, raylet and pool controller may each take this many seconds to start on a very busy machine.
START_DEADLINE_S = 300.0
_REGISTER_POLL_S = 0.2
_NUM_ACTOR_PORTS = 200
_FIRST_ACTOR_PORT = 20  # the first port of Ray's actors is `first_port` plus this number

# With these settings an idle process of Ray wakes less often.
_QUIET = {
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_grpc_client_channel_backup_poll_interval_ms": "0",
    "RAY_io_context_event_loop_lag_collection_interval_ms": "0",
    "RAY_io_context_monitor_probe_interval_ms": "60000",
    "RAY_kill_idle_workers_interval_ms": "10000",
    "RAY_metrics_report_interval_ms": "600000",
    "RAY_object_manager_timer_freq_ms": "10000",
    "RAY_raylet_check_gc_period_milliseconds": "10000",
    "RAY_ray_events_report_interval_ms": "60000",
    "RAY_raylet_death_check_interval_milliseconds": "5000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_report_worker_backlog_interval_ms": "10000",
    "RAY_task_events_report_interval_ms": "0",
}

# By default, Ray's memory monitor and Linux's OOM killer would end Tandem's agents first when
# memory is short, because Ray gives its actors an OOM score of 1000. That would not help: an agent
# has only 40 MB and is restarted at once. So the monitor is off, and the OOM score is not raised.
_SPARE_AGENTS = {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_oom_score_adjustment": "0"}

# By default, Ray gives its actors a niceness of 15, which the processes of the agents would
# inherit. At that niceness, a restarted worker would get a thirtieth of the CPU time of a worker
# that the launcher started.
_KEEP_PRIORITY = {"RAY_worker_niceness": "0"}

# Tandem's nodes have no CPUs for Ray's tasks (num_cpus=0). By default, Ray would start the agents
# of such a node one after another, which takes several times as long on a busy machine.
_START_TOGETHER = {"RAY_worker_maximum_startup_concurrency": "8"}

_WAIT_LONG = {
    "RAY_gcs_server_port_wait_time_s": f"{START_DEADLINE_S:.0f}",
    "RAY_raylet_start_wait_time_s": f"{START_DEADLINE_S:.0f}",
}

# With these settings, Ray reports a host as dead after about 10 s without an answer. A raylet that
# was only slow for that long is reported, too, and is restarted.
_SEE_LOSS = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
}


class RayNode(msgspec.Struct, frozen=True):
    """The settings of Ray on one machine. If `first_port` is 0, the system chooses all ports."""

    address: str = LOOPBACK
    host_id: str = ""
    cores: list[int] = []  # cores of the machine, NUMA node by NUMA node
    numa: list[int] = []  # number of cores of each NUMA node
    num_gpus: int = 0
    labels: dict[str, str] = {}
    first_port: int = 0
    head_address: str = ""  # address of the head's GCS; empty: this node is the head
    tls_dir: str = ""  # folder with ca.crt, tls.crt and tls.key; empty: plain text

    @property
    def gcs_port(self) -> int:
        return self.first_port and self.first_port + 1

    @property
    def gcs_address(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return self.head_address or f"{host}:{self.gcs_port}"

    @property
    def ports(self) -> dict[str, int]:
        """Ports of Ray's listeners: name of Ray's parameter -> port. Port 0 means that the system
        chooses."""
        if not self.first_port:
            return {"gcs_server_port": 0}
        first = self.first_port
        return {
            "gcs_server_port": first + 1,
            "node_manager_port": first + 2,
            "object_manager_port": first + 3,
            "runtime_env_agent_port": first + 4,
            "metrics_export_port": first + 5,
            "metrics_agent_port": first + 6,
            "dashboard_agent_listen_port": first + 7,
            "dashboard_port": first + 9,  # no process listens on it
            "min_worker_port": first + _FIRST_ACTOR_PORT,
            "max_worker_port": first + _FIRST_ACTOR_PORT + _NUM_ACTOR_PORTS - 1,
        }

    @property
    def node_labels(self) -> dict[str, str]:
        if not self.host_id:
            return {}
        cores, numa = shown_cores(self.cores), "_".join(map(str, self.numa))
        if len(read_cores(cores)) < len(self.cores) or len(numa) > _LABEL_MAX:
            # All cores, in the order of their numbers, matter more than their nodes.
            cores, numa = shown_cores(sorted(self.cores)), ""
        return {
            **self.labels,
            HOST_LABEL: self.host_id,
            CORES_LABEL: cores,
            NUMA_LABEL: numa,
            GPUS_LABEL: str(self.num_gpus),
        }


class HeadStarted(msgspec.Struct, frozen=True):
    address: str
    pids: dict[str, int]  # process name -> pid; the names are gcs_server, raylet and others
    head_s: float
    controller_s: float


def head_environment(
    environment: Mapping[str, str], run_folder: Path, node: RayNode | None = None
) -> dict[str, str]:
    """Builds the environment of Ray's processes on a machine. In a cluster of one machine, also
    writes a new token for Ray's RPCs to a file."""
    node = node or RayNode()
    if not node.host_id:
        write_ray_token(run_folder, secrets.token_hex(32))
    return {
        **{k: v for k, v in environment.items() if not k.startswith("RAY_")},
        **_QUIET,
        **_SPARE_AGENTS,
        **_KEEP_PRIORITY,
        **_START_TOGETHER,
        **_WAIT_LONG,
        **(_SEE_LOSS if node.host_id else {}),
        **_tls_environment(node),
        RUN_FOLDER_VARIABLE: str(run_folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(run_folder / _TOKEN_FILE),
        "RAY_USAGE_STATS_ENABLED": "0",
        # 0: Ray listens only on loopback. By default, it uses the machine's external address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1" if node.address != LOOPBACK else "0",
        # 0: Ray does not hide the GPUs from actors without GPUs. Agents are such actors, and the
        # workers inherit their environment (gpus.py).
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def write_ray_token(run_folder: Path, token: str) -> None:
    """Writes the token of Ray's RPCs, which all hosts of a cluster share."""
    path = run_folder / _TOKEN_FILE
    path.touch(mode=0o600)
    path.write_text(token)


def _tls_environment(node: RayNode) -> dict[str, str]:
    if not node.tls_dir:
        return {}
    folder = Path(node.tls_dir)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / "tls.crt"),
        "RAY_TLS_SERVER_KEY": str(folder / "tls.key"),
        "RAY_TLS_CA_CERT": str(folder / "ca.crt"),
    }


def shown_cores(cores: Sequence[int]) -> str:
    """Formats cores as ranges for a label value, such as 0-3_8-11. Ranges that do not fit into 63
    characters are left out."""
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    text = ""
    for first, last in ranges:
        more = f"{text and '_'}{first}-{last}"
        if len(text + more) > _LABEL_MAX:
            break
        text += more
    return text


def read_cores(text: str) -> list[int]:
    """Parses ranges of cores in the format of `shown_cores`: 0-1_4-5 gives 0, 1, 4 and 5."""
    pairs = [part.split("-") for part in text.split("_") if part]
    return [core for first, last in pairs for core in range(int(first), int(last) + 1)]


def start_ray(temp_dir: Path, node: RayNode) -> tuple[str, dict[str, int]]:
    """Starts a head. If `node` has a `head_address`, starts a node that joins that head instead.
    Returns the address of the GCS and the pids of the started processes, which outlive this
    process."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Small(Node):  # type: ignore[misc]
        def start_api_server(self, **_: Any) -> None:
            self._webui_url = ""

        def start_ray_processes(self) -> None:
            super().start_ray_processes()
            # Ray itself would give up after 30 s, but a busy machine may need longer.
            _wait_until_registered(self)

    is_head = not node.head_address
    ports = node.ports
    if not is_head:
        del ports["gcs_server_port"]
    # The sockets get a folder of their own, because `temp_dir` may be too long for their paths.
    sockets = Path(tempfile.mkdtemp(prefix="ray-"))
    params = RayParams(
        node_ip_address=node.address,
        gcs_address=node.head_address or None,
        webui=None if is_head else "",
        labels=node.node_labels or None,
        temp_dir=str(temp_dir),
        plasma_store_socket_name=str(sockets / "plasma_store"),
        raylet_socket_name=str(sockets / "raylet"),
        num_cpus=0,
        num_gpus=0,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        **ports,
    )
    # shutdown_at_exit=False: the processes outlive this one.
    started = Small(params, head=is_head, shutdown_at_exit=False, spawn_reaper=False)
    pids = {name: infos[0].process.pid for name, infos in started.all_processes.items()}
    return started.gcs_address, pids


def _wait_until_registered(node: Any) -> None:
    """Waits until a `ray._private.node.Node` has registered with the GCS.

    Raises RuntimeError if one of the node's processes ends, or after `START_DEADLINE_S`.
    """
    from ray._private.services import get_node

    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            get_node(node.gcs_address, node._node_id)
            return
        except RuntimeError as error:  # the raylet has not registered yet
            for name, infos in node.all_processes.items():
                if any(info.process.poll() is not None for info in infos):
                    raise RuntimeError(f"Ray's {name} ended") from error
            if time.monotonic() > deadline:
                raise
        time.sleep(_REGISTER_POLL_S)


def main(run_folder: str, node_json: str) -> None:
    started = start_ray(Path(run_folder) / "ray", msgspec.json.decode(node_json, type=RayNode))
    sys.stdout.buffer.write(msgspec.json.encode(started))


if __name__ == "__main__":
    main(*sys.argv[1:])
