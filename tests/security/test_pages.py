"""No page of the router runs or loads anything of another origin."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

# Attributes and CSS that make a browser load something or go somewhere.
REFERENCE = re.compile(r"""(?i)\b(?:src|href|action|poster|data)\s*=|@import|url\(|//[a-z0-9]""")


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
async def test_no_page_of_fastapi_is_served(router: RunningRouter, path: str) -> None:
    assert (await router.http.get(path)).status_code == 404


async def test_the_document_of_the_api_is_served(router: RunningRouter) -> None:
    answer = await router.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert "/v1/completions" in answer.json()["paths"]


async def test_the_page_refers_to_nothing_but_its_own_origin(router: RunningRouter) -> None:
    page = (await router.admin.get("/")).text
    assert REFERENCE.findall(page) == []
    assert re.findall(r"""fetch\(["'](.*?)["']""", page) == ["v1/cluster"]


async def test_a_browser_runs_the_pages_own_script_and_nothing_else(router: RunningRouter) -> None:
    answer = await router.admin.get("/")
    sources = answer.headers["content-security-policy"].split("; ")
    policy = dict(source.split(" ", 1) for source in sources)
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(directive) == f"'sha256-{digest}'"
    assert not re.search(r"""\son\w+\s*=|\sstyle\s*=""", answer.text)  # the policy forbids them
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
