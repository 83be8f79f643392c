"""A Ray cluster with Ray's autoscaler (version 2), whose nodes are raylets on this machine.

created -> `start` -> head -> a request of resources -> more raylets -> idle for a while -> fewer
`-- `close` ends all of it
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FakeMultiNodeProvider,
)
from ray.cluster_utils import AutoscalingCluster

from tandem.cluster.processes import guardian
from tandem.common.config.cluster import CLUSTER_ID_VARIABLE
from tests.harness.cluster import free_port

_OBJECT_STORE_BYTES = 80 << 20
_START_DEADLINE_S = 120.0
# settings that Ray's wheel lacks although AutoscalingCluster reads them
_BASE = {
    "cluster_name": "fake_multinode",
    "max_workers": 8,
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{
        key: []
        for key in (
            "initialization_commands",
            "setup_commands",
            "head_setup_commands",
            "worker_setup_commands",
            "head_start_ray_commands",
            "worker_start_ray_commands",
            "cluster_synced_files",
            "rsync_exclude",
            "rsync_filter",
        )
    },
    "file_mounts_sync_continuously": False,
}


class AutoscalingRay(AutoscalingCluster):  # type: ignore[misc]
    """Ray's own test cluster, except that its `start` and `shutdown` do not end other Rays on this
    machine."""

    def __init__(
        self,
        environment: dict[str, str],
        head: dict[str, float],
        nodes: dict[str, dict[str, Any]],
        *,
        idle_timeout_s: float,
    ) -> None:
        """`environment` is for all nodes and has the cluster's id. `nodes` are the node types:
        resources, labels, and limits of their number."""
        # short, because Ray's sockets are in it
        self._folder = Path(tempfile.mkdtemp(prefix="ray"))
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._cluster_id = environment[CLUSTER_ID_VARIABLE]
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {**environment, **own, "RAY_USAGE_STATS_ENABLED": "0"}
        types = {
            name: {
                "resources": {
                    "CPU": 0,
                    "object_store_memory": _OBJECT_STORE_BYTES,
                    **node["resources"],
                },
                "labels": node.get("labels", {}),
                "node_config": {},
                "min_workers": 0,
                "max_workers": node["max_workers"],
            }
            for name, node in nodes.items()
        }
        super().__init__(
            {"CPU": 0, **head},
            types,
            autoscaler_v2=True,
            idle_timeout_minutes=idle_timeout_s / 60,
        )

    def _generate_config(
        self, head_resources: Any, worker_node_types: Any, autoscaler_v2: bool = False, **more: Any
    ) -> dict[str, Any]:
        assert autoscaler_v2
        head = {"resources": dict(head_resources), "node_config": {}, "max_workers": 0}
        provider = {
            "type": "external",  # the wheel lacks the defaults of the type fake_multinode
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": self.address,
        }
        types = {**worker_node_types, "ray.head.default": head}
        return {**_BASE, "provider": provider, "available_node_types": types, **more}

    def start(self, *_: Any, **__: Any) -> None:
        config = self._folder / "config.json"
        config.write_text(json.dumps(self._config))
        resources = {k: v for k, v in self._head_resources.items() if k != "CPU"}
        environment = {
            **os.environ,
            **self.environment,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
        command += [f"--port={self._port}", f"--temp-dir={self._folder}", "--num-cpus=0"]
        command += [f"--resources={json.dumps(resources)}", f"--autoscaling-config={config}"]
        command += [f"--object-store-memory={_OBJECT_STORE_BYTES}", "--include-dashboard=false"]
        with (self._folder / "start.log").open("wb") as log:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=_START_DEADLINE_S,
                start_new_session=True,
                check=False,
            )
        assert done.returncode == 0, (self._folder / "start.log").read_text()[-3000:]

    @property
    def num_nodes(self) -> int:
        """Counts the raylets, including the head's."""
        names = []
        for pid in guardian.cluster_processes(self._cluster_id):
            try:
                names.append(psutil.Process(pid).name())
            except psutil.NoSuchProcess:
                continue
        return names.count("raylet")

    def monitor_log(self) -> str:
        """The end of the autoscaler's log, which explains why nodes were added and removed."""
        logs = sorted(self._folder.glob("session_2*/logs/monitor*.log"))
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)

    def shutdown(self) -> None:
        guardian.end_cluster(self._cluster_id)
        shutil.rmtree(self._folder, ignore_errors=True)
