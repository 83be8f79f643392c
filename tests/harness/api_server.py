"""A stand-in for Kubernetes' API server that serves the scale of StatefulSets and Deployments.

It uses HTTPS and a service account's folder as mounted by kubelet. Like the real server it refuses
a wrong token, method, content type or path, resources that the account's Role does not name, and
changes that do not leave a valid autoscaling/v1 Scale (Kubernetes' own schema, strict). It follows
Kubernetes' documentation and the requests of kubectl (a merge patch); it was not compared with a
real API server.
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/stateful-set-v1/
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate

from tests.harness.redis_kinds import make_certificates

HOST = "127.0.0.1"
VERSION = "1.34"
MERGE_PATCH = "application/merge-patch+json"
_PATH = re.compile(r"/apis/apps/v1/namespaces/([^/]+)/(statefulsets|deployments)/([^/]+)/scale")
_HANG_S = 30.0  # longest time that a request without an answer stays open


def merge_patch(target: Any, patch: Any) -> Any:
    """Applies a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


@dataclass
class ApiServer:
    """`replicas` is by RESOURCE/NAME. `answer` is a status for all requests; 0: no response at
    all."""

    folder: Path  # an empty folder for certificates and the account
    namespace: str
    replicas: dict[str, int]
    # the Role's rules: (verb, resource such as statefulsets/scale, name)
    allowed: Iterable[tuple[str, str, str]]
    answer: int | None = None
    token: str = "a-token"
    port: int = 0
    requests: list[str] = field(default_factory=list)  # path and query of each request
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        certificates = make_certificates(self.folder)
        self.account = self.folder / "account"
        self.account.mkdir()
        self.write_token(self.token)
        (self.account / "namespace").write_text(self.namespace)
        (self.account / "ca.crt").write_bytes(certificates.authority.read_bytes())
        self._server = ThreadingHTTPServer((HOST, 0), _handler(self))
        self._server.daemon_threads = True
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificates.certificate, certificates.key)
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port

    def write_token(self, token: str) -> None:
        """Replaces the token, as kubelet does before it expires. Only the new token is accepted."""
        self.token = token
        (self.account / "token").write_text(token)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that Kubernetes sets in every container of a pod."""
        return {"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": str(self.port)}

    def __enter__(self) -> ApiServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the server. Later connections are refused."""
        if not self._over.is_set():
            self._over.set()
            self._server.shutdown()
            self._server.server_close()

    def serve(
        self, method: str, url: str, headers: Any, body: bytes
    ) -> tuple[int, dict[str, Any]] | None:
        self.requests.append(url)
        path = urlsplit(url).path
        status = self.answer
        if status == 0:
            self._over.wait(_HANG_S)
            return None
        if headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        match = _PATH.fullmatch(path)
        if match is None or match[1] != self.namespace:
            return _status(404, "the server could not find the requested resource")
        resource, name = match[2], match[3]
        verb = {"PATCH": "patch", "GET": "get"}.get(method, method.lower())
        if (verb, f"{resource}/scale", name) not in set(self.allowed):
            return _status(
                403, f'{resource}.apps "{name}" is forbidden: it cannot {verb} {resource}'
            )
        if status is not None:
            return _status(status, f"as the test wants it: {status}")
        owner = f"{resource}/{name}"
        if owner not in self.replicas:
            return _status(404, f'{resource}.apps "{name}" not found')
        if method == "GET":
            return 200, self._scale(owner)
        if headers.get("Content-Type") != MERGE_PATCH:
            return _status(415, "the body of the request was in an unknown format")
        try:
            scale = merge_patch(self._scale(owner), json.loads(body))
            kubernetes_validate.validate(scale, VERSION, strict=True)
            assert type(scale["spec"]["replicas"]) is int
            assert scale["spec"]["replicas"] >= 0
        except Exception as error:
            return _status(422, f"Scale is invalid: {error}")
        self.replicas[owner] = scale["spec"]["replicas"]
        return 200, self._scale(owner)

    def _scale(self, owner: str) -> dict[str, Any]:
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": owner.split("/")[1], "namespace": self.namespace},
            # Go omits optional fields that are zero.
            "spec": {"replicas": self.replicas[owner]} if self.replicas[owner] else {},
            "status": {"replicas": 1, "selector": "app=x"},
        }


def _status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "code": code,
    }


def _handler(api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PATCH(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answered = api.serve(self.command, self.path, self.headers, body)
            if answered is None:
                self.close_connection = True
                return
            data = json.dumps(answered[1]).encode()
            self.send_response(answered[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_PUT = do_POST = do_GET = do_PATCH  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
