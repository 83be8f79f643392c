"""A Ray head for one machine, as small as it gets, and the pool controller on it.

    python -m tandem.cluster.ray.head RUN_FOLDER

starts GCS and raylet on free ports of 127.0.0.1, with a token, reads a `ClusterSpec` as JSON from
standard input (which may come later than the start), makes the pool controller, prints one line of
JSON (`HeadStarted`) and ends; what it started stays.
`ray start` would also start a dashboard server, an autoscaler monitor and a client server, and
listen on the machine's outer address; Ray's own Node is therefore used, which is not public: this
file is the one that may have to change with Ray.
"""

import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.cluster.pools import ClusterSpec
from tandem.pool_sizes import POOL_SIZE_MAX, POOLS

NAMESPACE = "tandem"
_OBJECT_STORE_BYTES = 80 << 20  # the smallest Ray takes; nothing of Tandem's goes there
_CONTROLLER_DEADLINE_S = 90.0

# Idle cost on a small machine: an actor 0.6% of a core by default, 0.4% with these.
_QUIET = {
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_grpc_client_channel_backup_poll_interval_ms": "0",
    "RAY_io_context_event_loop_lag_collection_interval_ms": "0",
    "RAY_io_context_monitor_probe_interval_ms": "60000",
    "RAY_metrics_report_interval_ms": "600000",
    "RAY_ray_events_report_interval_ms": "60000",
    "RAY_raylet_death_check_interval_milliseconds": "5000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_report_worker_backlog_interval_ms": "10000",
    "RAY_task_events_report_interval_ms": "0",
}

# Ray's memory monitor and, by a score of 1000, Linux's OOM killer would end Tandem's agents first
# when memory is short. An agent has 40 MB: its end frees nothing, and it is started again at once.
_SPARE_AGENTS = {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_oom_score_adjustment": "0"}


class HeadStarted(msgspec.Struct, frozen=True):
    address: str
    pids: dict[str, int]  # gcs_server and raylet
    head_s: float
    controller_s: float


def head_environment(environment: Mapping[str, str], run_folder: Path) -> dict[str, str]:
    """Returns the head's environment. Makes its token, in the run folder, for joiners."""
    token = run_folder / "ray.token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        **{k: v for k, v in environment.items() if not k.startswith("RAY_")},
        **_QUIET,
        **_SPARE_AGENTS,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_usage_stats_enabled": "0",
        # Everything on the loopback address, where Ray would take the machine's outer one.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Agents hand their environment to workers, which must see the GPUs.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def start_head(temp_dir: Path) -> tuple[str, dict[str, int]]:
    """Returns (address, pids of GCS and raylet). They outlive this process."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Head(Node):  # type: ignore[misc]
        def start_api_server(self, **_: Any) -> None:
            self._webui_url = ""

    params = RayParams(
        node_ip_address="127.0.0.1",
        gcs_server_port=0,
        temp_dir=str(temp_dir),
        num_cpus=0,
        num_gpus=0,
        resources=dict.fromkeys(POOLS, POOL_SIZE_MAX),
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    node = Head(params, head=True, shutdown_at_exit=False, spawn_reaper=False)
    pids = {name: infos[0].process.pid for name, infos in node.all_processes.items()}
    return node.gcs_address, pids


def main(run_folder: Path) -> None:
    started = time.monotonic()
    import ray

    from tandem.cluster.ray.controller import start_controller

    address, pids = start_head(run_folder / "ray")
    head_s = time.monotonic() - started
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ClusterSpec)
    spec_at = time.monotonic()
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address="127.0.0.1",
    )
    controller = start_controller(spec)
    ray.get(controller.state.remote(), timeout=_CONTROLLER_DEADLINE_S)
    done = HeadStarted(address, pids, head_s, time.monotonic() - spec_at)
    sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
