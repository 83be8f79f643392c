"""The chart as real Helm renders it, and what Kubernetes makes of its containers' command lines."""

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
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster


def values_of(example: Path | None) -> dict[str, Any]:
    """The values in a file; none for the chart's own."""
    return yaml.safe_load(example.read_text()) if example else {}


@cache
def chart() -> Chart:
    return Chart.load(CHART)


def render(values: Mapping[str, Any] | None = None) -> list[Object]:
    """All objects of the release, in the templates' order. Raises HelmError as `helm` would."""
    return load_objects(chart().render(dict(values or {}), name=RELEASE, namespace=NAMESPACE))


def load_objects(rendered: Mapping[str, str]) -> list[Object]:
    """The objects in rendered templates, in the templates' order."""
    found: list[Object] = []
    for template, text in sorted(rendered.items()):
        if template.endswith(".yaml"):
            found += filter(None, yaml.load_all(text, _Loader))
    return found


def notes(values: Mapping[str, Any] | None = None) -> str:
    rendered = chart().render(dict(values or {}), name=RELEASE, namespace=NAMESPACE)
    return rendered["tandem/templates/NOTES.txt"]


def find(objects: list[Object], kind: str, component: str) -> Object:
    """The one object of a kind and a component."""
    (found,) = (o for o in objects if o["kind"] == kind and component_of(o) == component)
    return found


def component_of(made: Object) -> str:
    return str(made["metadata"]["labels"]["app.kubernetes.io/component"])


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yields (component, pod with metadata and spec) of every object that makes pods."""
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
    """A container of a component's pods: the only one, or the one of that name."""
    (pod,) = (p for c, p in pod_templates(objects) if c == component)
    (found,) = (c for c in pod["spec"]["containers"] if name in ("", c["name"]))
    return dict(found)


def environment(objects: list[Object], made: Object, fields: Mapping[str, str]) -> dict[str, str]:
    """A container's variables as kubelet resolves them, `fields` being those of the pod."""
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
    """The command of a pool's worker: its container's, or the one that Ray's agent runs in it."""
    for made in objects:
        if "pools.json" in made.get("data", {}):
            words = json.loads(made["data"]["pools.json"])[pool]["command"]
            return [_expand(word, variables) for word in words]
    return command_line(container(objects, pool, "worker"), variables)


def options(command: list[str]) -> dict[str, str]:
    """`--name value` of a rendered command line, without the dashes."""
    pairs = zip(command, [*command[1:], ""], strict=True)
    return {a.removeprefix("--"): b for a, b in pairs if a.startswith("--")}


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Expands $(NAME) of variables that were set before, as kubelet does, and leaves all else as it
    is."""
    return re.sub(r"\$\((\w+)\)", lambda m: variables.get(m[1], m[0]), text)
