"""The stand-in for Kubernetes' API server refuses what the real one would."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest

from tests.harness.api_server import MERGE_PATCH, ApiServer

pytestmark = pytest.mark.service

DECODE = "statefulsets/demo-decode"


def answer(server: ApiServer, content_type: str, body: bytes) -> httpx.Response:
    tls = ssl.create_default_context(cafile=str(server.account / "ca.crt"))
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": content_type}
    url = f"https://127.0.0.1:{server.port}/apis/apps/v1/namespaces/serving/{DECODE}/scale"
    return httpx.patch(url, verify=tls, headers=headers, content=body)


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b'{"spec": {"replicas": 2}}', 415),
        (MERGE_PATCH, b'{"spec": {"replicas": "2"}}', 422),
        (MERGE_PATCH, b'{"spec": {"replicas": null}}', 422),
        (MERGE_PATCH, b'{"spec": {"replica": 2}}', 422),
        (MERGE_PATCH, b'{"spec": {"replicas": -1}}', 422),
        (MERGE_PATCH, b'{"replicas": 2}', 422),
        (MERGE_PATCH, b'{"spec": {"replicas": 2}}', 200),
    ],
)
def test_the_stand_in_takes_patches_of_a_scale_alone(
    tmp_path: Path, content_type: str, body: bytes, status: int
) -> None:
    allowed = {("patch", "statefulsets/scale", "demo-decode")}
    with ApiServer(tmp_path, "serving", {DECODE: 1}, allowed) as server:
        assert answer(server, content_type, body).status_code == status
        assert server.replicas[DECODE] == (2 if status == 200 else 1)
