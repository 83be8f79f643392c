"""Ray's calls between pods are encrypted, with a certificate that each pod makes for itself."""

from __future__ import annotations

import base64
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tandem.cluster.launch.certificates import Authority
from tandem.cluster.launch.pod_certificate import make_pod_certificate
from tandem.errors import ConfigError
from tests.harness.chart import (
    EXAMPLES,
    WITH_RAYS_HEAD,
    Object,
    container,
    pod_templates,
    render,
    values_of,
)

KUBERAY = {e.stem: values_of(e) for e in EXAMPLES if "kuberay" in e.stem}
ALL = [WITH_RAYS_HEAD, *KUBERAY.values()]
by_values = pytest.mark.parametrize("values", ALL, ids=["head", *KUBERAY])
FOLDER = "/etc/tandem/ray"


def ray_containers(objects: list[Object]) -> list[tuple[Object, Object]]:
    """Returns (the pod's spec, container) of each that runs Ray: those that have Ray's token."""
    return [
        (pod["spec"], made)
        for _, pod in pod_templates(objects)
        for made in pod["spec"]["containers"]
        if any(e["name"] == "RAY_AUTH_TOKEN" for e in made.get("env", []))
    ]


def tls_of(made: Object) -> dict[str, str]:
    """Returns the variables of Ray's TLS."""
    told = {e["name"]: e.get("value", "") for e in made.get("env", [])}
    return {k: v for k, v in told.items() if k == "RAY_USE_TLS" or k.startswith("RAY_TLS_")}


@by_values
def test_whoever_has_rays_token_sends_it_encrypted(values: dict[str, Any]) -> None:
    objects = render(values)
    found = ray_containers(objects)
    assert len(found) == (3 if "rayCluster" in values else 1)
    authorities = set()
    for pod, made in found:
        told = tls_of(made)
        assert told.pop("RAY_USE_TLS") == "1"
        files = {Path(path).name: str(Path(path).parent) for path in told.values()}
        assert files == dict.fromkeys(("ca.crt", "tls.crt", "tls.key"), f"{FOLDER}/tls")
        (init,) = (c for c in pod["initContainers"] if c["name"] == "ray-certificate")
        assert f"{FOLDER}/tls" in init["args"]
        (own,) = (m["name"] for m in init["volumeMounts"] if m["mountPath"] == FOLDER)
        assert {"name": own, "mountPath": FOLDER, "readOnly": True} in made["volumeMounts"]
        (authority,) = (v for v in pod["volumes"] if v["name"] == "ray-authority")
        authorities.add(authority["secret"]["secretName"])
        with_key = [
            c["name"]
            for c in (*pod["initContainers"], *pod["containers"])
            if any(m["name"] == "ray-authority" for m in c["volumeMounts"])
        ]
        assert with_key == ["ray-certificate"]
    made = [o["metadata"]["name"] for o in objects if o["kind"] == "Secret"]
    assert len(authorities) == 1
    assert authorities <= set(made)


def test_the_container_of_rays_autoscaler_has_the_certificate_too() -> None:
    (cluster,) = (o for o in render(KUBERAY["kuberay-autoscaled"]) if o["kind"] == "RayCluster")
    told = cluster["spec"]["autoscalerOptions"]
    assert tls_of(told) == tls_of(
        cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    )
    assert FOLDER in [m["mountPath"] for m in told["volumeMounts"]]


@by_values
def test_without_internal_tls_there_is_none(values: dict[str, Any]) -> None:
    off = {**values, "tls": {"internal": {"enabled": False}}}
    objects = render(off)
    assert "RAY_USE_TLS" not in str(objects)
    assert "ray-authority" not in str(objects)


def test_no_pod_without_ray_has_the_authority() -> None:
    pods = pod_templates(render(WITH_RAYS_HEAD))
    assert "ray-authority" not in str([pod for name, pod in pods if name != "ray-head"])
    assert "ray-authority" not in str(render()), "there is no head by default"


def greeted(folder: Path, name: str) -> str:
    """Returns the subject that a client with the same certificate sees at a server of that name.
    Both verify the other, as Ray's do."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    for context in (server, client):
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    here, there = socket.socketpair()
    serving = threading.Thread(target=lambda: server.wrap_socket(there, server_side=True).close())
    serving.start()
    try:
        with client.wrap_socket(here, server_hostname=name) as tls:
            (subject,) = tls.getpeercert()["subject"]  # type: ignore[index]
            return str(subject[0][1])
    finally:
        here.close()
        serving.join(10)
        there.close()


def test_a_pods_certificate_is_of_its_addresses_and_of_the_heads_name(tmp_path: Path) -> None:
    """The authority is the one that Helm makes, which identifies keys in its own way."""
    objects = render(KUBERAY["kuberay"])
    (secret,) = (o for o in objects if o["metadata"]["name"] == "demo-tandem-ray-authority")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).write_bytes(base64.b64decode(secret["data"][name]))
    (pod,) = (pod["spec"] for name, pod in pod_templates(objects) if name == "ray-head")
    (init,) = pod["initContainers"]
    assert init["args"][2:] == ["$(POD_IP)", "demo-tandem-ray"]
    service = "demo-tandem-ray-head-svc.serving.svc.cluster.local"
    names = ["10.1.2.3", *init["args"][3:]]
    make_pod_certificate(tmp_path, tmp_path / "own", names, {"FQ_RAY_IP": service})
    assert (tmp_path / "own" / "tls.key").stat().st_mode & 0o777 == 0o600
    for name in ("10.1.2.3", "demo-tandem-ray", service, "127.0.0.1", "localhost"):
        assert greeted(tmp_path / "own", name) == "ray"


def key_of(made: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, password: bytes = b"") -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    pkcs8 = serialization.PrivateFormat.PKCS8
    return made.private_bytes(serialization.Encoding.PEM, pkcs8, encryption)


def elliptic() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (lambda: key_of(rsa.generate_private_key(65537, 2048)), "must be an elliptic-curve key"),
        (lambda: key_of(elliptic(), b"secret"), "encrypted"),
        (lambda: key_of(elliptic()), "do not belong together"),
        (lambda: b"no key", "PEM"),
    ],
    ids=["rsa", "password", "another's", "broken"],
)
def test_an_authority_that_cannot_sign_is_named(
    tmp_path: Path, key: Callable[[], bytes], why: str
) -> None:
    (tmp_path / "tls.crt").write_bytes(Authority("ray").pem)
    (tmp_path / "tls.key").write_bytes(key())
    with pytest.raises(ConfigError, match=f"{tmp_path}, cannot be used: .*{why}"):
        make_pod_certificate(tmp_path, tmp_path / "own", ["10.1.2.3"], {})
    assert not (tmp_path / "own").exists()


def test_the_init_container_ends_with_one_line_and_status_2(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tandem.cluster.launch.pod_certificate"]
    command = [*program, str(tmp_path), str(tmp_path / "own"), "10.1.2.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith("ray-certificate: ")
    assert f"{tmp_path / 'tls.crt'}" in line


def test_the_head_starts_no_client_server() -> None:
    made = container(render(WITH_RAYS_HEAD), "ray-head")
    assert made["command"][:4] == ["python", "-m", "tandem.cluster.ray.start_command", "start"]
