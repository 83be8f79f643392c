"""`POST /v1/cluster/index/verify`: whether the prefix tree says what the workers hold."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.config import RouterConfig
from tandem.errors import BadRequest
from tandem.router.api.http.body import read_json_object
from tandem.router.api.http.errors import JsonResponse
from tandem.router.index.audit import IndexAudit, Verdict


def add_index_routes(app: FastAPI, config: RouterConfig, audit: IndexAudit) -> None:
    @app.post("/v1/cluster/index/verify")
    async def verify(request: Request) -> Response:
        """Of a sample of entries, or with `{"all": true}` of every one."""
        body = await read_json_object(request, config)
        if not isinstance(body.get("all", False), bool) or body.keys() - {"all"}:
            raise BadRequest('the body must be {} or {"all": true}', param="all")
        verdicts = await audit.verify(everything=body.get("all", False))
        return JsonResponse({"workers": {name: _shown(v) for name, v in verdicts.items()}})


def _shown(verdict: Verdict) -> dict[str, Any]:
    found = verdict.differences
    return {
        "checked": found.num_checked,
        "missing": found.missing,
        "stale": found.stale,
        "in_tree": found.in_tree,
        "error": verdict.error,
        "ok": not (found.any or verdict.error),
    }
