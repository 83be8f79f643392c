"""The chart as rendered by real Helm, and the command lines of its containers as Kubernetes expands
them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path(__file__).parents[2] / "helm" / "tandem"
EXAMPLES = sorted((CHART.parent / "examples").glob("*.yaml"))
RELEASE = "demo"
NAMESPACE = "serving"
WITH_RAYS_HEAD: dict[str, Any] = {"ray": {"head": {"enabled": True}}}

Object = dict[str, Any]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster than the Python loader


def values_of(example: Path | None) -> dict[str, Any]:
    """Loads the values in a file; no values if `example` is None."""
    return yaml.safe_load(example.read_text()) if example else {}


@cache
def chart() -> Chart:
    return Chart.load(CHART)


def render(values: Mapping[str, Any] | None = None) -> list[Object]:
    """Renders all objects of the release, in the templates' order. Raises HelmError like `helm`."""
    return load_objects(chart().render(dict(values or {}), name=RELEASE, namespace=NAMESPACE))


def load_objects(rendered: Mapping[str, str]) -> list[Object]:
    """Loads the objects in rendered templates, in the templates' order."""
    found: list[Object] = []
    for template, text in sorted(rendered.items()):
        if template.endswith(".yaml"):
            found += filter(None, yaml.load_all(text, _Loader))
    return found


def notes(values: Mapping[str, Any] | None = None) -> str:
    rendered = chart().render(dict(values or {}), name=RELEASE, namespace=NAMESPACE)
    return rendered["tandem/templates/NOTES.txt"]


def find(objects: list[Object], kind: str, component: str) -> Object:
    """Finds the only object of a kind and a component."""
    (found,) = (o for o in objects if o["kind"] == kind and component_of(o) == component)
    return found


def component_of(made: Object) -> str:
    return str(made["metadata"]["labels"]["app.kubernetes.io/component"])


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yields (component, pod with metadata and spec) for every object that creates pods."""
    for made in objects:
        match made["kind"]:
            case "Deployment" | "StatefulSet" | "Job":
                yield component_of(made), made["spec"]["template"]
            case "Pod":
                yield component_of(made), made
            case "RayCluster":
                groups = [made["spec"]["headGroupSpec"], *made["spec"]["workerGroupSpecs"]]
                for group in groups:
                    yield component_of(group["template"]), group["template"]


def container(objects: list[Object], component: str, name: str = "") -> Object:
    """Finds a container of a component's pods: the only one, or the one with the given name."""
    (pod,) = (p for c, p in pod_templates(objects) if c == component)
    (found,) = (c for c in pod["spec"]["containers"] if name in ("", c["name"]))
    return dict(found)


def environment(objects: list[Object], made: Object, fields: Mapping[str, str]) -> dict[str, str]:
    """Resolves a container's environment variables like kubelet; `fields` has the pod's fields."""
    secrets = {o["metadata"]["name"]: o["data"] for o in objects if o["kind"] == "Secret"}
    found: dict[str, str] = {}
    for entry in made.get("env", []):
        match entry.get("valueFrom", {}):
            case {"secretKeyRef": {"name": name, "key": key}}:
                found[entry["name"]] = base64.b64decode(secrets[name][key]).decode()
            case {"fieldRef": {"fieldPath": path}}:
                found[entry["name"]] = fields[path]
            case _:
                found[entry["name"]] = _expand(entry["value"], found)
    return found


def command_line(made: Object, variables: Mapping[str, str]) -> list[str]:
    return [_expand(a, variables) for a in (*made["command"], *made.get("args", []))]


def worker_command(objects: list[Object], pool: str, variables: Mapping[str, str]) -> list[str]:
    """The command line of a pool's worker: its container's, or the one that Ray's agent runs."""
    for made in objects:
        if "pools.json" in made.get("data", {}):
            words = json.loads(made["data"]["pools.json"])[pool]["command"]
            return [_expand(word, variables) for word in words]
    return command_line(container(objects, pool, "worker"), variables)


def options(command: list[str]) -> dict[str, str]:
    """Parses `--name value` pairs of a rendered command line; names have no dashes."""
    pairs = zip(command, [*command[1:], ""], strict=True)
    return {a.removeprefix("--"): b for a, b in pairs if a.startswith("--")}


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Expands $(NAME) of known variables like kubelet, and leaves all other text unchanged."""
    return re.sub(r"\$\((\w+)\)", lambda m: variables.get(m[1], m[0]), text)
