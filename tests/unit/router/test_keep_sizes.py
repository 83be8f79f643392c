"""The size of an object after an upgrade; tests/chart/test_upgrades.py has real upgrades."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.errors import DeadlineExceeded, ScaleAway
from tandem.router.scaling import keep_sizes
from tandem.router.scaling.keep_sizes import (
    LATE,
    REPLICAS_ANNOTATION,
    SURGE,
    kept_size,
    main,
    read_objects,
    run_job,
)

TEMPLATE = Path(__file__).parents[3] / "helm/tandem/templates/_names.tpl"


def live(
    size: int, *, told: str = "", scaled: bool = False, surged: bool = False
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"annotations": {REPLICAS_ANNOTATION: told}} if told else {}
    if scaled:
        owned = {"f:spec": {"f:replicas": {}}}
        metadata["managedFields"] = [
            {"manager": "helm", "operation": "Apply", "fieldsV1": owned},
            {"manager": "kubectl", "subresource": "scale", "fieldsV1": owned},
        ]
    if surged:
        metadata["managedFields"][1]["manager"] = SURGE
    return {"metadata": metadata, "spec": {"replicas": size}}


@pytest.mark.parametrize(
    ("there", "replicas", "size"),
    [
        (live(5, told="2"), 2, 5),
        (live(5, told="2", scaled=True), 3, 3),
        (live(0, told="2", scaled=True), 2, 0),
        (live(2, told="2"), 3, 3),
        (live(4, scaled=True), 2, 4),  # by a chart that noted no value
        (live(4), 2, 2),
        (live(4, told="2"), None, 4),
        (live(0, scaled=True), None, 0),
        (live(2, told="1", scaled=True, surged=True), 1, 1),  # an upgrade that failed added one
        (live(2, scaled=True, surged=True), None, 1),
    ],
)
def test_the_size_after_an_upgrade(there: dict[str, Any], replicas: int | None, size: int) -> None:
    assert kept_size(there, replicas) == size


def test_objects_are_words() -> None:
    words = ["statefulsets/a=0", "statefulsets/b", "deployments/c=3"]
    assert read_objects(words) == {"statefulsets/a": 0, "statefulsets/b": None, "deployments/c": 3}


def test_the_annotation_is_the_charts() -> None:
    assert f"}}}}{REPLICAS_ANNOTATION}{{{{" in TEMPLATE.read_text()


def test_outside_a_pod_it_ends_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("tandem.net.observability.logs.configure_logging", lambda _: None)
    monkeypatch.setattr(keep_sizes.sys, "argv", ["keep_sizes", "statefulsets/a=1"])
    assert main() == 1
    assert "the upgrade fails" in caplog.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (ScaleAway("503"), 1),
        (httpx.ConnectError("refused"), 1),
        (DeadlineExceeded("no room"), LATE),
    ],
)
def test_a_job_that_was_late_is_told_apart(
    error: Exception | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_sizes, "open_client", lambda _: httpx.AsyncClient())

    async def run(_: httpx.AsyncClient, __: object) -> None:
        if error:
            raise error

    assert run_job(run) == status
