"""The Pod Security Standard that a namespace may enforce.

https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.chart import EXAMPLES, WITH_RAYS_HEAD, pod_templates, render, values_of

PRIVILEGED = {"h100-dra", "h100-rdma"}  # docs/kubernetes.md names them
_VOLUMES = {"configMap", "emptyDir", "image", "persistentVolumeClaim", "projected", "secret"}
_HOST = ("hostNetwork", "hostPID", "hostIPC")


def violations(pod: dict[str, Any]) -> list[str]:
    """Returns what the standard `restricted` forbids of a pod."""
    spec = pod["spec"]
    found = [field for field in _HOST if spec.get(field)]
    for volume in spec.get("volumes", []):
        found += [kind for kind in volume.keys() - {"name"} if kind not in _VOLUMES]
    for made in [*spec["containers"], *spec.get("initContainers", [])]:
        # A container's own fields replace the pod's.
        secured = {**spec.get("securityContext", {}), **made.get("securityContext", {})}
        capabilities = secured.get("capabilities", {})
        allowed = {
            "runAsNonRoot": secured.get("runAsNonRoot") is True,
            "runAsUser": secured.get("runAsUser") != 0,
            "seccompProfile": secured.get("seccompProfile", {}).get("type") == "RuntimeDefault",
            "allowPrivilegeEscalation": secured.get("allowPrivilegeEscalation") is False,
            "drop": "ALL" in capabilities.get("drop", []),
            "add": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "privileged": not secured.get("privileged"),
            "hostPort": not any("hostPort" in port for port in made.get("ports", [])),
        }
        found += [f"{made['name']}: {field}" for field, holds in allowed.items() if not holds]
    return found


@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda e: e.stem if e else "defaults")
def test_the_restricted_standard_admits_all_pods_but_workers_of_two_examples(
    example: Path | None,
) -> None:
    values = values_of(example) | {"upgradeHook": {"enabled": True}}
    if example is None:
        values |= WITH_RAYS_HEAD | {"upgradeHook": {"surge": True}}
    needs = {
        component: violations(pod)
        for component, pod in pod_templates(render(values))
        if violations(pod)
    }
    if example and example.stem in PRIVILEGED:
        assert needs.keys() == {"prefill", "decode"}
    else:
        assert needs == {}
