"""A canary: the names of Ray that are not public and that the loopback head stands on."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import ray

# What tandem/cluster/ray/node.py takes of each: attributes, and arguments of its constructor.
_TAKEN = {
    "ray._private.node.Node": (
        ("start_api_server", "all_processes", "gcs_address"),
        ("head", "shutdown_at_exit", "spawn_reaper"),
    ),
    "ray._private.parameter.RayParams": (
        (),
        (
            "node_ip_address",
            "gcs_server_port",
            "temp_dir",
            "num_cpus",
            "num_gpus",
            "object_store_memory",
            "include_dashboard",
            "include_log_monitor",
            "no_monitor",
            "gcs_address",
            "webui",
            "labels",
            "node_manager_port",
            "object_manager_port",
            "runtime_env_agent_port",
            "metrics_export_port",
            "metrics_agent_port",
            "dashboard_agent_listen_port",
            "dashboard_port",
            "min_worker_port",
            "max_worker_port",
        ),
    ),
}


@pytest.mark.parametrize("path", _TAKEN)
def test_ray_still_has_what_the_loopback_head_takes(path: str) -> None:
    module, _, name = path.rpartition(".")
    told = (
        f"Ray {ray.__version__} changed {path}, which is private: adapt tandem/cluster/ray/node.py "
        "to it, or stay on the version that pyproject.toml pins"
    )
    attributes, arguments = _TAKEN[path]
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.fail(told)
    source = inspect.getsource(kind)
    missing = [a for a in attributes if not (hasattr(kind, a) or f"self.{a}" in source)]
    missing += [a for a in arguments if a not in inspect.signature(kind.__init__).parameters]
    assert not missing, f"{told} (missing: {', '.join(missing)})"


def test_ray_start_still_looks_for_the_client_servers_dependencies() -> None:
    name = "get_ray_client_dependency_error"
    module = importlib.import_module("ray.scripts.scripts")
    told = f"Ray {ray.__version__} changed {name}: adapt tandem/cluster/ray/start_command.py"
    assert hasattr(module, name), told
    assert f"has_ray_client = {name}() is None" in Path(module.__file__ or "").read_text(), told


def test_ray_still_takes_the_address_of_its_node() -> None:
    taken = inspect.getsource(ray.init)
    assert "_node_ip_address" in taken, f"Ray {ray.__version__}: ray.init takes no node address"
