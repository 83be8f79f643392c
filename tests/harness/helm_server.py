"""A stand-in for Kubernetes' API server that real Helm installs into and upgrades.

It serves discovery and objects, and keeps them in memory. Server-side apply has the three rules
that sizes depend on, of which `spec.replicas` is the only field that it looks at:

- another value than a field's owner set is a conflict (409), and the same value shares the field;
- a field that its only owner leaves out falls back to its default, 1;
- who changes a scale owns the field alone.

It also refuses changes of fields that nobody may change (422).

https://kubernetes.io/docs/reference/using-api/server-side-apply/
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import yaml

Object = dict[str, Any]
_KINDS = {
    "v1": {
        "configmaps": "ConfigMap",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
}
# https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/#update-strategies
_STATEFUL_SET_CHANGES = (
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
)
_HELM, _SCALER = "helm", "kubectl"


@dataclass
class HelmServer:
    """`objects` is by path. `owners` names who owns `spec.replicas` of the object at a path."""

    objects: dict[str, Object] = field(default_factory=dict)
    owners: dict[str, set[str]] = field(default_factory=dict)
    port: int = 0

    def __enter__(self) -> HelmServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def scale(self, path: str, replicas: int) -> None:
        """Sets a size as `kubectl scale` does."""
        made = self.objects[path]
        made["spec"]["replicas"] = replicas
        self.owners[path] = {_SCALER}
        owned = {"f:spec": {"f:replicas": {}}}
        made["metadata"]["managedFields"] = [
            {"manager": _SCALER, "operation": "Update", "subresource": "scale", "fieldsV1": owned}
        ]

    def apply(self, path: str, applied: Object) -> int:
        """Applies an object as Helm, and returns the status of the answer."""
        if path in self.objects and fixed_fields(self.objects[path]) != fixed_fields(applied):
            return 422
        before = self.objects.get(path, {}).get("spec", {}).get("replicas")
        owners = self.owners.setdefault(path, set())
        replicas = applied.get("spec", {}).get("replicas")
        if replicas is None:
            owners.discard(_HELM)
            if path.split("/")[-2] in _KINDS["apps/v1"]:
                applied["spec"]["replicas"] = before if owners else 1
        elif owners - {_HELM} and replicas != before:
            return 409
        else:
            owners.add(_HELM)
        self.objects[path] = applied
        return 200

    def answer(self, path: str) -> Object | None:
        """Returns what GET of a path finds."""
        if path == "/version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [_group(version) for version in _KINDS if "/" in version]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if path == "/openapi/v3":
            roots = {version: "apis" if "/" in version else "api" for version in _KINDS}
            urls = {
                f"{root}/{v}": {"serverRelativeURL": f"{path}/{v}"} for v, root in roots.items()
            }
            return {"paths": urls}
        if (version := path.removeprefix("/openapi/v3/")) in _KINDS:
            return _schema(version)
        if (version := re.sub("^/apis?/", "", path)) in _KINDS:
            return _resources(version)
        return self.objects.get(path)


def fixed_fields(made: Object) -> Object:
    """Returns the fields of an object that an update may not change."""
    spec = made.get("spec", {})
    match made["kind"]:
        case "StatefulSet":
            return {k: v for k, v in spec.items() if k not in _STATEFUL_SET_CHANGES}
        case "Deployment":
            return {"selector": spec["selector"]}
        case "Service":
            return {"clusterIP": spec.get("clusterIP")}
        case "RoleBinding":
            return {"roleRef": made["roleRef"]}
        case "Secret":
            return {"type": made.get("type", "Opaque")}
    return {}


def _group(version: str) -> Object:
    name, number = version.split("/")
    only = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [only], "preferredVersion": only}


def _resources(version: str) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    resources = [
        {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
        for name, kind in _KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _schema(version: str) -> Object:
    """Says only that the server itself checks the fields of what is applied."""
    group, _, number = version.rpartition("/")
    checks = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {
        f"/{name}": {
            "patch": {
                "parameters": [checks],
                "responses": {},
                "x-kubernetes-group-version-kind": {
                    "group": group,
                    "version": number,
                    "kind": kind,
                },
            }
        }
        for name, kind in _KINDS[version].items()
    }
    return {"openapi": "3.0.0", "info": {"title": version, "version": number}, "paths": paths}


def _handler(server: HelmServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # an answer is one packet

        def log_message(self, *_: object) -> None:
            """The test reads the objects."""

        def do_GET(self) -> None:
            found = server.answer(urlsplit(self.path).path)
            self._send(200 if found is not None else 404, found)

        def do_POST(self) -> None:
            made = self._body()
            path = f"{urlsplit(self.path).path}/{made['metadata']['name']}"
            self._send(server.apply(path, made), made)

        def do_PATCH(self) -> None:
            applied = self._body()
            assert self.headers["Content-Type"] == "application/apply-patch+yaml"
            self._send(server.apply(urlsplit(self.path).path, applied), applied)

        def _body(self) -> Object:
            return dict(yaml.safe_load(self.rfile.read(int(self.headers["Content-Length"]))))

        def _send(self, status: int, answer: Object | None) -> None:
            if status >= 400:
                reason = {404: "NotFound", 409: "Conflict", 422: "Invalid"}[status]
                answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
                answer |= {"reason": reason, "code": status, "message": f"{reason}: {self.path}"}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
