"""The files of the operators' page: `/` and `/page/...`. They are the same for everybody.

They are read once, at start; a path is a key of a table, so no path leads out of the folder. The
policy lets a browser run the page's own scripts, use its own style sheets and call its own origin;
nothing inline runs, and nothing is loaded from another site (https://www.w3.org/TR/CSP3/).
"""

from pathlib import Path

from fastapi import FastAPI, HTTPException
from starlette.responses import Response

from tandem.api.http.guard import PAGE_PREFIX

_FOLDER = Path(__file__).with_name("page")
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page_routes(app: FastAPI) -> None:
    files = {
        path.relative_to(_FOLDER).as_posix(): (path.read_bytes(), _KINDS[path.suffix])
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _KINDS
    }

    def answer(name: str) -> Response:
        content, media_type = files[name]
        return Response(content, media_type=media_type, headers=HEADERS)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return answer("index.html")

    @app.get(PAGE_PREFIX + "{name:path}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return answer(name)
