"""Upgrades by real Helm, by server-side apply, into a stand-in for the API server: sizes, and the
chart before this one.

The Job that keeps sizes runs in the stand-in. tests/unit/router/test_keep_sizes.py has its rule.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmError

from tandem.router.scaling.kubernetes.keep_sizes import MANAGER
from tests.harness.chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    WITH_RAYS_HEAD,
    Object,
    component_of,
    render,
)
from tests.harness.helm_release import NO_KEYS, OBJECTS, Release, installed
from tests.harness.helm_server import HelmServer

# As `helm package` made it, of commit a4502884: no release is older.
BEFORE = Path(__file__).parents[1] / "data" / "charts" / "tandem-0.1.0.tgz"
NO_HOOK = {"upgradeHook": {"enabled": False}}
# Values with which a pool's size has another owner than the chart.
OWNERS: dict[str, dict[str, Any]] = {
    "other": {"decode": {"sizeOwner": "other"}},
    "hpa": {
        "decode": {
            "sizeOwner": "hpa",
            "hpa": {"metrics": [{"type": "Resource", "resource": {"name": "cpu"}}]},
        }
    },
    "keda": {
        "decode": {"sizeOwner": "keda", "keda": {"prometheus": "http://prometheus:9090"}},
        "router": {"options": {"autoscale": "dry-run"}},
    },
}


@pytest.fixture
def release() -> Iterator[Release]:
    with installed(CHART) as made:
        yield made


@pytest.fixture
def release_before() -> Iterator[Release]:
    with installed(BEFORE) as made:
        yield made


@pytest.mark.parametrize("hook", [{}, NO_HOOK], ids=["hook", "no hook"])
def test_an_upgrade_keeps_sizes_that_were_set_meanwhile(
    release: Release, hook: dict[str, Any]
) -> None:
    for size, name in enumerate(OBJECTS, start=5):
        release.scale(name, size)
    release.upgrade({"decode": {"replicas": 2}, "logLevel": "DEBUG", **hook})
    assert [release.size(name) for name in OBJECTS] == [5, 6, 7]


def test_an_upgrade_states_no_size_that_has_an_owner(release: Release) -> None:
    """A size that changes between Helm's look and its upgrade is no conflict then."""
    release.scale("decode", 5)
    release.upgrade({"decode": {"replicas": 2}})
    owners = release.server.owners
    stated = release.server.stated
    assert owners[OBJECTS["decode"]] == {"kubectl", MANAGER}
    assert stated[OBJECTS["decode"]] is None
    assert owners[OBJECTS["prefill"]] == {"helm", MANAGER}  # nobody else had set it
    release.upgrade({"decode": {"replicas": 2}})
    assert [stated[path] for path in OBJECTS.values()] == [None, None, None]
    assert [owners[path] for path in OBJECTS.values()] == [
        {MANAGER},
        {"kubectl", MANAGER},
        {MANAGER},
    ]
    assert release.server.jobs == ["Complete", "Complete"]
    release.upgrade({"decode": {"replicas": 2}, **NO_HOOK})
    assert [release.size(name) for name in OBJECTS] == [1, 5, 2]


def test_nothing_of_the_job_stays(release: Release) -> None:
    release.upgrade({})
    assert release.server.jobs == ["Complete"]
    assert not [path for path in release.server.objects if path.endswith("-keep-sizes")]


def test_an_upgrade_stops_where_the_job_fails(release: Release) -> None:
    release.server.while_read = lambda path: release.server.scale(path, 4)  # again and again
    with pytest.raises(HelmError, match="pre-upgrade"):
        release.upgrade({"decode": {"replicas": 2}, "logLevel": "DEBUG"})
    assert "DEBUG" not in str(release.server.objects[OBJECTS["decode"]]["spec"]["template"])
    release.server.while_read = None
    release.upgrade({"decode": {"replicas": 2}, "logLevel": "DEBUG"})
    assert [release.size(name) for name in ("prefill", "decode", "router")] == [4, 2, 2]


def test_a_pool_of_none_stays_empty(release: Release) -> None:
    release.scale("decode", 0)
    release.upgrade({"decode": {"replicas": 2}})
    assert release.size("decode") == 0


def test_a_changed_value_is_the_new_size(release: Release) -> None:
    assert release.size("decode") == 2
    release.upgrade({"decode": {"replicas": 3}})
    assert release.size("decode") == 3
    release.upgrade({"decode": {"replicas": 3}})
    assert release.size("decode") == 3


def test_a_changed_value_wins_over_a_size_that_was_set_meanwhile(release: Release) -> None:
    release.scale("decode", 5)
    release.upgrade({"decode": {"replicas": 3}})
    assert release.size("decode") == 3
    release.scale("decode", 6)
    release.upgrade({"decode": {"replicas": 3}})
    assert release.size("decode") == 6


def test_without_the_hook_a_changed_value_and_a_size_that_was_set_conflict(
    release: Release,
) -> None:
    release.scale("decode", 5)
    with pytest.raises(HelmError, match="conflict occurred"):
        release.upgrade({"decode": {"replicas": 3}, **NO_HOOK})
    release.scale("decode", 3)
    release.upgrade({"decode": {"replicas": 3}, **NO_HOOK})
    assert release.size("decode") == 3


def test_a_changed_value_is_ignored_if_the_job_does_not_run(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chart cannot know of `helm upgrade --no-hooks`, which leaves the Job out."""
    release.upgrade({"decode": {"replicas": 2}})
    with monkeypatch.context() as without_job:
        done = {"conditions": [{"type": "Complete", "status": "True"}]}
        without_job.setattr(HelmServer, "_run", lambda _, job: job.update(status=done))
        release.upgrade({"decode": {"replicas": 3}})
    assert release.size("decode") == 2
    release.upgrade({"decode": {"replicas": 3}})
    assert release.size("decode") == 2


@pytest.mark.parametrize(
    "values",
    [*OWNERS.values(), {**OWNERS["keda"], **NO_HOOK}],
    ids=[*OWNERS, "keda, no hook"],
)
def test_a_new_owner_takes_over_the_size_that_is_there(
    release: Release, values: dict[str, Any]
) -> None:
    for _ in range(2):
        release.upgrade(values)
        assert release.size("decode") == 2
    release.scale("decode", 6)
    release.upgrade(values)
    assert release.size("decode") == 6


def sync(server: HelmServer, values: dict[str, Any]) -> None:
    """Applies rendered objects as a tool does that cannot look up what is there, and that runs
    hooks first, such as Argo CD."""

    def hook_of(made: Object) -> str:
        return str(made["metadata"].get("annotations", {}).get("helm.sh/hook", ""))

    def weight(made: Object) -> int:
        return int(made["metadata"]["annotations"]["helm.sh/hook-weight"])

    objects = render(NO_KEYS | values)
    hooks = sorted((o for o in objects if hook_of(o) == "pre-upgrade"), key=weight)
    for made in (*hooks, *(o for o in objects if not hook_of(o))):
        group = made["apiVersion"]
        resource = f"{made['kind'].lower()}s"
        root = f"/apis/{group}" if "/" in group else f"/api/{group}"
        name = made["metadata"]["name"]
        assert server.apply(f"{root}/namespaces/{NAMESPACE}/{resource}/{name}", made) == 200


@pytest.mark.parametrize("kept", [True, False])
def test_a_tool_without_look_up_resets_no_size_if_it_runs_the_hook(kept: bool) -> None:
    hook = {} if kept else NO_HOOK
    with HelmServer() as server:
        sync(server, {"decode": {"replicas": 2}})  # nothing is there for the Job yet
        assert server.jobs == ["Complete"]
        assert server.owners[OBJECTS["decode"]] == {"helm"}
        sync(server, {"decode": {"sizeOwner": "other"}, **hook})
        assert server.objects[OBJECTS["decode"]]["spec"]["replicas"] == (2 if kept else 1)
        server.scale(OBJECTS["decode"], 0)
        sync(server, {"decode": {"sizeOwner": "other"}, **hook})
        assert server.objects[OBJECTS["decode"]]["spec"]["replicas"] == 0


def test_the_jobs_account_may_read_and_set_sizes_and_nothing_else() -> None:
    (role,) = (o for o in render() if o["kind"] == "Role" and component_of(o) == "keep-sizes")
    names = {"demo-tandem-prefill", "demo-tandem-decode", "demo-tandem-router"}
    allowed = {
        (verb, resource): set(rule["resourceNames"])
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    pools = names - {"demo-tandem-router"}
    assert allowed == {
        ("get", "statefulsets"): pools,
        ("patch", "statefulsets/scale"): pools,
        ("get", "deployments"): {"demo-tandem-router"},
        ("patch", "deployments/scale"): {"demo-tandem-router"},
    }
    for values in (NO_HOOK, {"rbac": {"create": False}}):
        assert "keep-sizes" not in str(render(values))


def selectors(server: HelmServer) -> dict[str, Any]:
    """Returns the labels by which each object selects pods, by its path."""
    specs = {path: made.get("spec", {}) for path, made in server.objects.items()}
    return {
        path: spec.get("selector") or spec.get("podSelector")
        for path, spec in specs.items()
        if spec.get("selector") or spec.get("podSelector")
    }


def test_the_chart_before_is_upgraded_and_its_pods_stay_selected(release_before: Release) -> None:
    """The stand-in refuses changes of fields that nobody may change, as the API server does. The
    values are those that `--reset-then-reuse-values` gives."""
    server = release_before.server
    before = selectors(server)
    objects = dict(server.objects)
    release_before.upgrade({"decode": {"replicas": 2}, "logLevel": "DEBUG", **WITH_RAYS_HEAD})
    after = selectors(server)
    assert {path: after[path] for path in before} == before
    assert len(before) > 8
    secrets = [path for path in objects if "/secrets/" in path and "data" in objects[path]]
    assert any(path.endswith("-api-keys") for path in secrets)
    for path in secrets:  # keys and tokens that clients and pods have
        assert server.objects[path]["data"] == objects[path]["data"], path
    pool = server.objects[OBJECTS["decode"]]
    assert component_of(pool) == "decode"
    assert "DEBUG" in str(pool["spec"]["template"])


def test_rays_head_of_the_chart_before_goes_with_the_new_defaults(release_before: Release) -> None:
    def heads() -> list[str]:
        return [path for path in release_before.server.objects if "ray" in path]

    assert any(path.endswith("deployments/demo-tandem-ray") for path in heads())
    release_before.upgrade({"decode": {"replicas": 2}})
    assert heads() == []


def test_sizes_of_the_chart_before_are_kept_if_somebody_set_them(release_before: Release) -> None:
    assert "tandem.dev/replicas" not in str(release_before.server.objects)
    release_before.scale("decode", 0)
    release_before.scale("router", 5)
    release_before.upgrade({"decode": {"replicas": 2}, "prefill": {"replicas": 3}})
    assert [release_before.size(name) for name in OBJECTS] == [3, 0, 5]


def test_reused_values_of_an_older_chart_upgrade_with_the_hook(tmp_path: Path) -> None:
    """Helm takes no default of the new chart with `--reuse-values`, so Ray's head stays, too."""
    older = tmp_path / "tandem"
    shutil.copytree(CHART, older)
    values = yaml.safe_load((older / "values.yaml").read_text())
    del values["upgradeHook"], values["ray"]["authority"]
    values["ray"]["head"]["enabled"] = True
    (older / "values.yaml").write_text(yaml.safe_dump(values))
    with installed(older) as release:
        release.scale("decode", 5)
        release.helm.upgrade(
            CHART, RELEASE, {"tls": {"internal": {"enabled": True}}}, reuse_values=True, timeout=60
        )
        assert release.server.jobs == ["Complete"]
        assert release.size("decode") == 5
        for name in ("deployments/demo-tandem-ray", "secrets/demo-tandem-ray-authority"):
            assert any(path.endswith(name) for path in release.server.objects), name


def test_values_that_an_older_chart_does_not_have_are_the_defaults() -> None:
    head = WITH_RAYS_HEAD["ray"]
    older = render({"upgradeHook": None, "ray": {**head, "authority": None}})
    with_defaults = [o for o in render(WITH_RAYS_HEAD) if o["kind"] != "Secret"]  # generated
    assert [o for o in older if o["kind"] != "Secret"] == with_defaults
    off = render({"upgradeHook": {"enabled": False, "resources": None}})
    assert "keep-sizes" not in str(off)


@pytest.mark.parametrize("field", ["serviceName", "podManagementPolicy", "selector"])
def test_the_stand_in_refuses_what_nobody_may_change(release: Release, field: str) -> None:
    spec = release.server.objects[OBJECTS["decode"]]["spec"]
    spec[field] = {"matchLabels": {"a": "b"}} if field == "selector" else "another"
    with pytest.raises(HelmError, match="Invalid"):
        release.upgrade({"decode": {"replicas": 2}})


def test_a_rollback_keeps_sizes_but_of_the_first_two_revisions(release: Release) -> None:
    """They state the sizes, because no Job had taken these over when they were rendered."""
    two: dict[str, Any] = {"decode": {"replicas": 2}}
    release.upgrade({"logLevel": "DEBUG", **two})
    release.upgrade(two)
    release.scale("prefill", 5)
    release.upgrade(two)
    release.helm.rollback(RELEASE, version=3, timeout=60)
    assert release.size("prefill") == 5
    with pytest.raises(HelmError, match="conflict occurred"):
        release.helm.rollback(RELEASE, version=2, timeout=60)
    release.scale("prefill", 1)
    release.helm.rollback(RELEASE, version=1, timeout=60)
    assert release.size("prefill") == 1
