"""The chart's certificates and Redis users work with our own client and server."""

from __future__ import annotations

import base64
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from helm_python import HelmError

from tandem.net.rpc.auth import KindInterceptor
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.rpc.peer_calls import PeerCalls, add_port
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import (
    WorkerServicer,
    WorkerStub,
    add_WorkerServicer_to_server,
)
from tandem.net.store.client import connect
from tests.harness.chart import NAMESPACE, RELEASE, Object, container, find, options, render
from tests.harness.cluster import wait_for
from tests.harness.pods import LocalPods

CLUSTER = f"{NAMESPACE}.{RELEASE}-tandem"
FILES = {"ca.crt", "tls.crt", "tls.key"}
REDIS_URL = "TANDEM_REDIS_URL"
EXTERNAL_REDIS = {"builtin": {"enabled": False}, "external": {"urlSecret": {"name": "redis"}}}


class Answers(WorkerServicer):
    """Answers a router's call."""

    async def SetRole(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.SetRoleResponse(role=request.role)


def secrets(objects: list[Object]) -> dict[str, Object]:
    """The Secrets with certificates, by kind."""
    prefix = f"{RELEASE}-tandem-tls-"
    named = {o["metadata"]["name"]: o for o in objects if o["kind"] == "Secret"}
    return {n.removeprefix(prefix): o for n, o in named.items() if n.startswith(prefix)}


def volume(objects: list[Object], component: str) -> Object:
    kind = "Deployment" if component in ("router", "redis") else "StatefulSet"
    volumes = find(objects, kind, component)["spec"]["template"]["spec"]["volumes"]
    return next(v for v in volumes if v["name"] == "tls")


async def test_a_router_and_a_worker_of_one_release_verify_each_other(tmp_path: Path) -> None:
    objects = render()
    for kind, secret in secrets(objects).items():
        (tmp_path / kind).mkdir()
        for name in FILES:
            (tmp_path / kind / name).write_bytes(base64.b64decode(secret["data"][name]))
    for component in ("router", "prefill", "decode"):
        assert options(container(objects, component)["args"])["tls-dir"] == "/etc/tandem/tls"
    assert set(secrets(objects)) == {"router", "worker", "redis"}
    server = grpc.aio.server(interceptors=[KindInterceptor(CLUSTER)])
    add_WorkerServicer_to_server(Answers(), server)
    files = CertificateFiles.in_folder(str(tmp_path / "worker"))
    address = f"127.0.0.1:{add_port(server, '127.0.0.1:0', files)}"
    await server.start()
    request = pb.SetRoleRequest(role="decode")
    async with PeerCalls(CLUSTER, "token", str(tmp_path / "router")).open(address) as channel:
        assert (await WorkerStub(channel).SetRole(request)).role == "decode"
    async with PeerCalls(CLUSTER, "token", str(tmp_path / "worker")).open(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
            await WorkerStub(channel).SetRole(request)
    await server.stop(None)


@pytest.mark.parametrize("component", ["router", "prefill", "decode", "redis"])
def test_each_pod_has_the_certificate_of_its_kind(component: str) -> None:
    kind = component if component in ("router", "redis") else "worker"
    mounted = volume(render(), component)["projected"]["sources"]
    assert [s["secret"]["name"] for s in mounted] == [f"{RELEASE}-tandem-tls-{kind}"]
    assert {i["path"] for i in mounted[0]["secret"]["items"]} == FILES


def test_cert_manager_makes_them_for_the_same_names() -> None:
    objects = render({"tls": {"internal": {"certManager": {"enabled": True}}}})
    assert not secrets(objects)
    made = {o["spec"]["secretName"]: o["spec"] for o in objects if o["kind"] == "Certificate"}
    for kind, more in (("router", []), ("worker", []), ("redis", [f"{RELEASE}-tandem-redis"])):
        spec = made[f"{RELEASE}-tandem-tls-{kind}"]
        assert spec["dnsNames"] == [f"{kind}.{CLUSTER}.tandem", *more]
        assert {"server auth", "client auth"} <= set(spec["usages"])
    issuers = {o["metadata"]["name"] for o in objects if o["kind"] == "Issuer"}
    assert {s["issuerRef"]["name"] for s in made.values()} <= issuers
    own = {"name": "corporate", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    values = {"tls": {"internal": {"certManager": {"enabled": True, "issuer": own}}}}
    objects = render(values)
    assert not [o for o in objects if o["kind"] == "Issuer"]
    made_by = [o["spec"]["issuerRef"] for o in objects if o["kind"] == "Certificate"]
    assert made_by == [own, own, own]
    objects = render(values | {"redis": EXTERNAL_REDIS})
    assert len([o for o in objects if o["kind"] == "Certificate"]) == 2


def test_roots_of_a_bundle_take_the_place_of_the_secrets() -> None:
    objects = render({"tls": {"internal": {"roots": {"configMap": "bundle", "key": "all.pem"}}}})
    secret, bundle = volume(objects, "decode")["projected"]["sources"]
    assert {i["path"] for i in secret["secret"]["items"]} == FILES - {"ca.crt"}
    items = [{"key": "all.pem", "path": "ca.crt"}]
    assert bundle == {"configMap": {"name": "bundle", "items": items}}


def test_without_internal_tls_there_is_none() -> None:
    objects = render({"tls": {"internal": {"enabled": False}}})
    assert not secrets(objects)
    for component in ("router", "decode"):
        assert "tls-dir" not in options(container(objects, component)["args"])
        (url,) = (e for e in container(objects, component)["env"] if e["name"] == REDIS_URL)
        assert url["value"].startswith("redis://")
    assert options(container(objects, "redis")["args"])["port"] == "6379"


def test_public_ports_with_a_certificate_are_probed_over_https() -> None:
    objects = render({"router": {"tls": {"secretName": "public"}}})
    router = container(objects, "router")
    given = options(router["args"])
    assert given["tls-cert"] == "/etc/tandem/public-tls/tls.crt"
    assert given["tls-key"] == "/etc/tandem/public-tls/tls.key"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert router[probe]["httpGet"]["scheme"] == "HTTPS"
    own = {e["name"]: e.get("value", "") for e in router["env"]}
    assert own["TANDEM_ADMIN_URL"].startswith("https://")
    environment = {e["name"]: e.get("value", "") for e in container(objects, "test")["env"]}
    assert environment["TANDEM_URL"].startswith("https://")


def test_each_kind_has_a_redis_user_of_its_own() -> None:
    objects = render()
    (text,) = [c for c in container(objects, "redis", "redis")["command"] if "user " in c]
    assert "user default off" in text
    assert "%CLUSTER%" not in text
    assert f"~{{tandem:{CLUSTER}}}:worker:*" in text
    passwords = {}
    for component, user in (("router", "router"), ("prefill", "worker"), ("decode", "worker")):
        env = {e["name"]: e for e in container(objects, component)["env"]}
        assert env[REDIS_URL]["value"].startswith(f"rediss://{user}:")
        passwords[user] = env["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"]
    assert passwords["router"] != passwords["worker"]


def test_redis_has_no_port_but_that_of_tls() -> None:
    objects = render()
    server = options(container(objects, "redis", "redis")["args"])
    assert (server["port"], server["unixsocket"]) == ("0", "/run/redis/redis.sock")
    assert "ports" not in container(objects, "redis", "redis")
    front = container(objects, "redis", "tls")
    given = options(front["args"])
    assert given["socket"] == server["unixsocket"]
    assert given["cluster-id"] == CLUSTER
    assert [p["containerPort"] for p in front["ports"]] == [6379]


def test_own_secrets_without_one_of_redis_are_refused() -> None:
    own = {"router": "mine", "worker": "mine"}
    with pytest.raises(HelmError, match="Redis has no certificate"):
        render({"tls": {"internal": {"existingSecrets": own}}})
    render({"tls": {"internal": {"existingSecrets": own}}, "redis": EXTERNAL_REDIS})
    render({"tls": {"internal": {"existingSecrets": own | {"redis": "mine"}}}})


async def test_clients_of_the_release_reach_its_redis_by_the_name_of_the_service(
    tmp_path: Path,
) -> None:
    """The chart's certificates, on the real server with its front."""
    objects = render()
    pods = LocalPods(objects, tmp_path)
    try:
        pods.start("redis", name="redis")
        front = pods.start("redis", name="tls")
        wait_for(lambda: front.passes("readinessProbe"), deadline_s=30, what="Redis's TLS port")
        for component in ("router", "decode"):
            url = pods.variables(component, container(objects, component))[REDIS_URL]
            async with connect(url) as redis:
                assert await redis.ping()
            folder = str(pods.folder / f"tls-{component}")
            context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
            context.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
            service = f"{RELEASE}-tandem-redis"
            with (
                socket.create_connection((front.address, 6379)) as tcp,
                context.wrap_socket(tcp, server_hostname=service) as tls,
            ):
                tls.sendall(b"PING\r\n")
                assert tls.recv(100).startswith(b"-NOAUTH")
    finally:
        pods.close()
