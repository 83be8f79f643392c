"""A stand-in for Kubernetes' API server into which real Helm installs and upgrades.

It serves discovery and objects, which it keeps in memory. Server-side apply implements the rules
that pool sizes depend on, for the field `spec.replicas` only:

- a value other than the one set by the field's owner is a conflict (409); the same value makes the
  applier a co-owner;
- a field that its only owner omits is reset to its default, 1;
- changing a scale makes the caller the only owner; applying the current value makes it a co-owner.

It also refuses changes of immutable fields (422). A Job completes as soon as it is created: the
server runs its program itself, with the permissions of the Job's Role.

https://kubernetes.io/docs/reference/using-api/server-side-apply/
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster, User

from tandem.router.scaling.kubernetes.keep_sizes import MANAGER, SURGE

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
    "batch/v1": {"jobs": "Job"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
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
_HELM = "helm"
_SCALER = "kubectl"
_ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/"
_WATCH_S = 30.0  # longest time that a watch stays open
_REASONS = {403: "Forbidden", 404: "NotFound", 409: "Conflict", 422: "Invalid"}


@dataclass
class HelmServer:
    """`objects` is by path. `owners` has the owners of `spec.replicas` of the object at a path, and
    `stated` what was last applied to it."""

    objects: dict[str, Object] = field(default_factory=dict)
    owners: dict[str, set[str]] = field(default_factory=dict)
    stated: dict[str, int | None] = field(default_factory=dict)
    port: int = 0
    jobs: list[str] = field(default_factory=list)  # how each job ended
    # called with the path of an object while it is read
    while_read: Callable[[str], None] | None = None
    _version: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> HelmServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def scale(self, path: str, replicas: int) -> None:
        """Sets a size like `kubectl scale`."""
        self.objects[path]["spec"]["replicas"] = replicas
        self.owners[path] = {_SCALER}
        self._mark(path)

    def apply_scale(self, path: str, scale: Object, manager: str) -> int:
        """Applies a scale by force as a field manager. Returns the HTTP status."""
        made = self.objects[path]
        if scale["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]:
            return 409
        if made["spec"]["replicas"] != scale["spec"]["replicas"]:
            self.owners[path] = set()
        made["spec"]["replicas"] = scale["spec"]["replicas"]
        self.owners[path].add(manager)
        self._mark(path)
        return 200

    def _mark(self, path: str) -> None:
        """Writes the owners and a new version to an object's metadata."""
        self._version += 1
        owned = {"f:spec": {"f:replicas": {}}}
        by_scale = {MANAGER: "Apply", SURGE: "Apply", _SCALER: "Update"}
        owners = self.owners.get(path, set())
        managers: list[Object] = [{"manager": _HELM, "operation": "Apply", "fieldsV1": {}}]
        if _HELM in owners:
            managers[0]["fieldsV1"] = owned
        for name in sorted(owners - {_HELM}):
            entry = {"manager": name, "operation": by_scale[name], "subresource": "scale"}
            managers.append({**entry, "fieldsV1": owned})
        metadata = self.objects[path]["metadata"]
        metadata |= {"managedFields": managers, "resourceVersion": str(self._version)}

    def apply(self, path: str, applied: Object) -> int:
        """Applies an object as Helm. Returns the HTTP status."""
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
        self.stated[path] = replicas
        self._mark(path)
        if applied["kind"] == "Job":
            self._run(applied)
        return 200

    def client(self, namespace: str, account: str | None = None) -> Client:
        """Returns a client with the token of a service account, or without one as Helm's is."""
        cluster = Cluster(server=f"http://127.0.0.1:{self.port}")
        user = User(token=account)
        config = KubeConfig.from_one(cluster=cluster, user=user, namespace=namespace)
        return Client(config, trust_env=False)

    def _run(self, job: Object) -> None:
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        program = importlib.import_module(container["command"][-1])
        ended = "Complete"
        try:
            with self.client(job["metadata"]["namespace"], pod["serviceAccountName"]) as client:
                program.run(client, container["args"])
        except Exception as error:
            self.jobs.append(repr(error))
            ended = "Failed"
        else:
            self.jobs.append(ended)
        job["status"] = {"conditions": [{"type": ended, "status": "True"}]}

    def allows(self, token: str, verb: str, path: str) -> bool:
        """Says whether the Role bound to a service account allows a request. Requests without a
        token are Helm's."""
        if not token:
            return True
        account = token.removeprefix("Bearer ")
        space, resource, name, *sub = path.removeprefix("/apis/apps/v1/namespaces/").split("/")
        binding = self.objects.get(f"{_ROLES}{space}/rolebindings/{account}", {})
        subjects = [s["name"] for s in binding.get("subjects", [])]
        role = self.objects.get(f"{_ROLES}{space}/roles/{binding['roleRef']['name']}", {})
        wanted = "/".join([resource, *sub])
        return account in subjects and any(
            verb in rule["verbs"] and wanted in rule["resources"] and name in rule["resourceNames"]
            for rule in role.get("rules", [])
        )

    def list(self, path: str) -> Object | None:
        """Lists the objects of one kind in a namespace."""
        match = re.fullmatch(r"/apis?/(.+)/namespaces/[^/]+/([^/]+)", path)
        if match is None or match[2] not in _KINDS.get(match[1], {}):
            return None
        kind = _KINDS[match[1]][match[2]]
        items = [o for at, o in self.objects.items() if at.rpartition("/")[0] == path]
        version = {"resourceVersion": str(self._version)}
        return {"kind": f"{kind}List", "apiVersion": match[1], "metadata": version, "items": items}

    def wait_over(self) -> None:
        """Blocks for as long as a watch without events stays open."""
        self._over.wait(_WATCH_S)

    def answer(self, path: str) -> Object | None:
        """Finds the answer to a GET of a path."""
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
    """Extracts the fields of an object that an update may not change."""
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
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
        for name, kind in _KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _schema(version: str) -> Object:
    """A schema that only says that the server itself validates applied fields."""
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
        wbufsize = 1 << 16  # each response is one packet

        def log_message(self, *_: object) -> None:
            """Logs nothing, because tests inspect the objects."""

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if not server.allows(self.headers.get("Authorization", ""), "get", url.path):
                self._send(403, None)
                return
            query = parse_qs(url.query)
            found = server.answer(url.path) or server.list(url.path)
            if "watch" in query and "sendInitialEvents" not in query:
                self.send_response(200)
                self.end_headers()
                self.wfile.flush()
                server.wait_over()
                self.close_connection = True
                return
            if server.while_read and "Authorization" in self.headers:
                found = copy.deepcopy(found)
                server.while_read(url.path)
            self._send(200 if found is not None and "watch" not in query else 404, found)

        def do_POST(self) -> None:
            made = self._body()
            path = f"{urlsplit(self.path).path}/{made['metadata']['name']}"
            self._send(server.apply(path, made), made)

        def do_PATCH(self) -> None:
            url = urlsplit(self.path)
            applied = self._body()
            assert self.headers["Content-Type"] == "application/apply-patch+yaml"
            if not server.allows(self.headers.get("Authorization", ""), "patch", url.path):
                self._send(403, None)
            elif url.path.endswith("/scale"):
                query = parse_qs(url.query)
                path = url.path.removesuffix("/scale")
                assert query.pop("force") == ["true"]
                self._send(server.apply_scale(path, applied, *query["fieldManager"]), applied)
            else:
                self._send(server.apply(url.path, applied), applied)

        def do_DELETE(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            gone = server.objects.pop(urlsplit(self.path).path, None)
            self._send(200 if gone else 404, gone)

        def _body(self) -> Object:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return dict(yaml.safe_load(sent) or {})

        def _send(self, status: int, answer: Object | None) -> None:
            if status >= 400:
                reason = _REASONS[status]
                answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
                answer |= {"reason": reason, "code": status, "message": f"{reason}: {self.path}"}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
