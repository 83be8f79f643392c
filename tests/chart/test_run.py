"""The rendered containers' commands are run on this machine, and a completion comes through them.

What only a cluster shows is not here: images, mounts and users, kubelet's own probing and preStop,
RBAC, NetworkPolicies, KubeRay. deploy/kind.sh installs the chart on one.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.harness.chart import (
    EXAMPLES,
    WITH_RAYS_HEAD,
    command_line,
    container,
    render,
    values_of,
)
from tests.harness.cluster import free_port, wait_for
from tests.harness.pods import LocalPods

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CACHE = Path(os.environ.get("TANDEM_CACHE_DIR") or Path.home() / ".cache/tandem")
START_DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def pods() -> Iterator[LocalPods]:
    """A pod of each component, started at once, as Kubernetes does."""
    laptop = next(values_of(e) for e in EXAMPLES if e.stem == "laptop")
    # Everything by a prefill worker, so that blocks travel.
    laptop["decode"] = {"options": {"prefillAt": "remote", "localPrefillMaxTokens": 0}}
    started = LocalPods(render(laptop | WITH_RAYS_HEAD), CACHE)
    try:
        started.start("redis", name="redis")
        started.start("redis", name="tls")
        started.start("ray-head", port=free_port())
        started.start("prefill")
        started.start("decode")
        started.start("router", host_option="--host")
        for pod in started.pods.values():
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in pod.made:
                    what = f"{probe} of {pod.component}"
                    wait_for(
                        lambda p=pod, name=probe: p.passes(name),
                        deadline_s=START_DEADLINE_S,
                        what=what,
                    )
        yield started
    finally:
        started.close()


def test_helm_test_makes_a_completion(pods: LocalPods) -> None:
    test = container(pods.objects, "test")
    variables = pods.variables("test", test)
    wait_for(lambda: _decode_sees_prefill(pods), deadline_s=60, what="a pair of workers")
    done = subprocess.run(
        command_line(test, variables),
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "Paris" in answer["choices"][0]["text"]
    metrics = httpx.get(f"http://{pods.address('decode')}:7001/metrics").text
    pulled = [x for x in metrics.splitlines() if x.startswith("tandem_kv_blocks_pulled_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in pulled) > 0


def test_strangers_are_refused_and_prometheus_key_reads_metrics_alone(pods: LocalPods) -> None:
    public, admin = (f"http://{pods.address('router')}:{port}" for port in (8000, 8002))
    key = pods.secret("api-keys")["metrics"].decode()
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{public}/v1/models").status_code == 401
    assert httpx.get(f"{public}/metrics").status_code == 404
    # The admin port needs no key here, where pods are on loopback; tests/security/test_admin.py has
    # another address.
    assert "tandem_requests_total" in httpx.get(f"{admin}/metrics", headers=headers).text
    assert httpx.get(f"{admin}/v1/cluster", headers=headers).status_code == 403


def test_rays_head_speaks_tls_and_has_no_client_server(pods: LocalPods) -> None:
    """Ray's program gets an answer with the variables of the head's container."""
    head = pods.pods["ray-head"]
    (port,) = (p["containerPort"] for p in head.made["ports"])
    asked = subprocess.run(
        ["ray", "health-check", "--address", f"{head.address}:{port}"],
        env=head.variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    context = ssl.create_default_context(cafile=head.variables["RAY_TLS_CA_CERT"])
    files = (head.variables[f"RAY_TLS_SERVER_{name}"] for name in ("CERT", "KEY"))
    context.load_cert_chain(*files)
    with (
        socket.create_connection((head.address, port)) as tcp,
        context.wrap_socket(tcp, server_hostname=head.address) as tls,
    ):
        assert tls.version() == "TLSv1.3"
    with socket.socket() as tried:
        assert tried.connect_ex((head.address, 10001)) != 0


def test_workers_and_router_go_in_order_when_told_to(pods: LocalPods) -> None:
    for component in ("router", "decode", "prefill", "redis/tls", "redis/redis"):
        assert pods.pods[component].end(60) == 0, pods.pods[component].words()
    for worker in ("decode", "prefill"):
        assert "drained in" in pods.pods[worker].words()


def _decode_sees_prefill(pods: LocalPods) -> bool:
    url = f"http://{pods.address('router')}:8002/v1/cluster"
    key = pods.secret("api-keys")["operator"].decode()
    workers = httpx.get(url, headers={"authorization": f"Bearer {key}"}).json()["workers"]
    return any(w["role"] == "decode" and w["transports"] for w in workers)
