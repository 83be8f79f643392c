"""The admin HTTP API for operators: cluster state, API keys, the audit trail, metrics, and the
operators' web page at `/`."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from tandem.api.admin.adapters import add_adapter_routes
from tandem.api.admin.cluster import add_cluster_routes
from tandem.api.admin.keys import add_key_routes
from tandem.api.admin.page_feed import LIVE_PATH, LiveStream, PageFeed
from tandem.api.http.errors import JsonResponse, install_handlers
from tandem.api.http.guard import PAGE_PREFIX, AdminGuard
from tandem.api.openai.replies import Replies
from tandem.api.openai.requests import ChatBody, parse_chat
from tandem.api.routes.generation import GenerationRoutes
from tandem.api.routes.health import add_health_routes
from tandem.api.routes.requests import add_request_route
from tandem.api.routes.usage import add_usage_route
from tandem.api.served_model import ServedModel, served_model
from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest
from tandem.net.security.access import Access
from tandem.net.security.audit_trail import ENTRIES_MAX, AuditTrail
from tandem.net.security.key_service import KeyService
from tandem.router.metrics.models import Labelled, merged
from tandem.router.metrics.vllm_names import VllmMetrics
from tandem.router.request.models import Models
from tandem.router.scaling.adapters import AdapterControl

CHAT_PATH = "/v1/cluster/chat"
PAGE_FOLDER = Path(__file__).with_name("page")
_PAGE_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PAGE_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_PAGE_HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _PAGE_POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_admin_app(
    config: RouterConfig,
    served: Sequence[ServedModel],
    pages: Mapping[str, PageFeed],
    access: Access,
    keys: KeyService,
    trail: AuditTrail,
) -> FastAPI:
    """Builds the app of the admin HTTP port for a router that serves these models. `pages` has what
    the page shows, by group."""
    models = Models(*(each.generator for each in served))
    first = served[0]
    app = FastAPI(
        title="Tandem, for operators",
        redirect_slashes=False,
        docs_url=None,  # FastAPI's documentation pages are off: they load scripts of another site.
        redoc_url=None,
    )
    install_handlers(app)
    app.add_middleware(AdminGuard, config=config, access=access, trail=trail)
    add_health_routes(app, models)
    add_cluster_routes(app, config, served)
    add_key_routes(app, config, keys, trail)
    add_request_route(app, models, trail)
    add_usage_route(app, first.generator)
    add_adapter_routes(app, config, AdapterControl(first.control, models, trail))
    add_chat_route(app, config, models)
    add_page_routes(app)

    @app.get(LIVE_PATH)
    async def live(request: Request) -> Response:
        """Streams what the page shows as server-sent events: all of it, then the changes. The
        query parameter `model` names a model; the default is the first one."""
        model = served_model(served, request.query_params.get("model", ""))
        return LiveStream(pages[model.config.group])

    @app.get("/v1/cluster/audit")
    async def entries(request: Request) -> Response:
        """Returns the last changes and refused calls at all routers, the newest first."""
        return JsonResponse({"entries": await trail.read(_limit(request))})

    @app.get("/v1/cluster/events")
    async def events(request: Request) -> Response:
        """Returns the last events and changes at all routers, the newest first."""
        found = await first.view.events.read(_limit(request), trail)
        return JsonResponse({"events": found})

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        """Returns the router's metrics; with `?names=vllm` under vLLM's names."""
        match request.query_params.get("names", "tandem"):
            case "tandem":
                text = generate_latest(_metrics(served))
            case "vllm":
                text = generate_latest(merged([_vllm_metrics(each) for each in served]))
            case _:
                raise BadRequest(
                    "the query parameter `names` must be tandem or vllm", param="names"
                )
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return app


def _metrics(served: Sequence[ServedModel]) -> Collector:
    """Returns the metrics of all models. If there are several, the metrics that each model has for
    itself have the label `model_name`."""
    if len(served) == 1:
        return served[0].metrics.registry
    return merged([Labelled(each.metrics.registry, each.generator.served_name) for each in served])


def _vllm_metrics(served: ServedModel) -> Collector:
    workers = [w.record for w in served.view.known() if w.record.has_kv]
    return VllmMetrics(served.metrics.registry, workers, served.generator.served_name)


def _limit(request: Request) -> int:
    """Reads the query parameter `limit`, which is 100 by default. Raises BadRequest if the number
    is out of range."""
    limit = request.query_params.get("limit", "100")
    if not (limit.isdecimal() and 1 <= int(limit) <= ENTRIES_MAX):
        raise BadRequest(
            f"the query parameter `limit` must be a number from 1 to {ENTRIES_MAX}", param="limit"
        )
    return int(limit)


def add_chat_route(app: FastAPI, config: RouterConfig, models: Models) -> None:
    """Adds the chat route of the operators' page.

    The public port also has a chat route, but the page cannot use that route: the page's content
    security policy allows calls only to the admin port, from which the page was loaded. AdminGuard
    requires an operator's key, a body of type `application/json`, and no foreign `Origin`.
    """

    routes = GenerationRoutes(config, models)

    @app.post(CHAT_PATH)
    async def chat(request: Request) -> Response:
        """Answers a chat as /v1/chat/completions of the public port does."""
        request.state.request_id = uuid.uuid4().hex
        request.state.client_id = ""
        body, headers = await routes.read(request, ChatBody)
        parsed = parse_chat(body, request.state.request_id)
        name = parsed.requests[0].model
        generator = routes.model(request, name)
        replies = Replies(parsed, generator.name_of(name), generator.tokenizer)
        return await routes.answer(request, parsed.requests, replies, headers, stream=parsed.stream)


def add_page_routes(app: FastAPI) -> None:
    """Adds routes for the files of the operators' page, at `/` and `/page/...`. The files contain
    no cluster data.

    All files are read once, at startup. A request looks up a file in memory by name, so no path can
    reach a file outside the page's folder. The content security policy allows only scripts, style
    sheets and calls of the page's own origin (https://www.w3.org/TR/CSP3/).
    """

    files = {
        path.relative_to(PAGE_FOLDER).as_posix(): (path.read_bytes(), _PAGE_KINDS[path.suffix])
        for path in sorted(PAGE_FOLDER.rglob("*"))
        if path.suffix in _PAGE_KINDS
    }

    def answer(name: str) -> Response:
        content, media_type = files[name]
        return Response(content, media_type=media_type, headers=_PAGE_HEADERS)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return answer("index.html")

    @app.get(PAGE_PREFIX + "{name:path}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return answer(name)
