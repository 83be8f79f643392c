"""No page of the router runs or loads anything from another origin."""

from __future__ import annotations

import re

import pytest

from tandem.api.admin.app import PAGE_FOLDER
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

# Attributes, CSS and calls that make a browser load or open something.
REFERENCE = re.compile(
    r"""(?ix) \b(?:src|href|action|poster|data)\s*=\s*["']([^"']+) | \burl\(([^)]*)\)
    | @import\s*(\S+) | \bfrom\s*["']([^"']+) | \bimport\s*["'(]+([^"')]+)
    | (?:fetch|post|change)\(\s*["'`]([^"'`]*)"""
)
OWN = re.compile(r"(\./|page/|v1/cluster|#|\$\{path\}/)[\w./#${}()-]*")
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def own_files() -> list[str]:
    files = (p.relative_to(PAGE_FOLDER) for p in PAGE_FOLDER.rglob("*.*"))
    return sorted(f.as_posix() for f in files if f.suffix[1:] in KINDS)


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
async def test_no_page_of_fastapi_is_served(router: RunningRouter, path: str) -> None:
    assert (await router.http.get(path)).status_code == 404


async def test_the_document_of_the_api_is_served(router: RunningRouter) -> None:
    answer = await router.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert "/v1/completions" in answer.json()["paths"]


async def test_the_page_refers_to_nothing_but_its_own_origin(router: RunningRouter) -> None:
    num_found = 0
    for name in own_files():
        if name.startswith("vendor/"):
            continue
        text = (await router.admin.get("/" if name == "index.html" else f"/page/{name}")).text
        plain = re.sub(r"(?m)(^|\s)// .*$", "", text).replace("http://www.w3.org/2000/svg", "")
        assert "//" not in plain.replace("://${", ""), name
        for groups in REFERENCE.findall(text):
            (target,) = filter(None, groups)
            assert OWN.fullmatch(target), (name, target)
            num_found += 1
    assert num_found > 20


async def test_every_file_of_the_page_is_served_under_the_strict_policy(
    router: RunningRouter,
) -> None:
    assert {"index.html", "main.js", "page.css", "vendor/uPlot.iife.min.js"} <= set(own_files())
    for path in ["/", *(f"/page/{name}" for name in own_files())]:
        answer = await router.admin.get(path)
        assert answer.status_code == 200, path
        kind = KINDS["html" if path == "/" else path.rpartition(".")[2]]
        assert answer.headers["content-type"].startswith(kind)
        sources = answer.headers["content-security-policy"].split("; ")
        assert dict(source.split(" ", 1) for source in sources) == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self'",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


async def test_the_page_has_nothing_that_the_policy_forbids(router: RunningRouter) -> None:
    page = (await router.admin.get("/")).text
    assert not re.search(r"""\son\w+\s*=|\sstyle\s*=|<style|javascript:""", page)
    assert re.findall(r"<script[^>]*>([^<]*)<", page) == ["", ""]
    for name in own_files():
        text = (PAGE_FOLDER / name).read_text()
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert name.startswith("vendor/") or not re.search(forbidden, text), name


@pytest.mark.parametrize(
    "path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page/", "/page/no.js", "/page/x/main.js"]
)
async def test_no_other_file_is_served(router: RunningRouter, path: str) -> None:
    assert (await router.admin.get(path)).status_code == 404
