"""The public HTTP API: OpenAI's completions and chats, models, requests, health.

It only translates: `request` decides what a request may be, `generator` what becomes of it.

A request that sends `x-tandem-timing: 1` gets its stages back as `Server-Timing` (W3C), which
browsers and proxies know. Of a stream the header has what lies before the first token, when it is
sent; all of it follows as a comment before `[DONE]`, which clients of server-sent events ignore.
Of several prompts the headers tell of one: the first with a token (a stream), or the last to end.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.config.router import RouterConfig
from tandem.errors import ModelNotFound, RequestNotFound
from tandem.router.admission.tenants import TENANT_HEADER, limits_of, tenant_of, visible_tenant
from tandem.router.api.admin.keys import add_record_route
from tandem.router.api.http.body import read_json_object
from tandem.router.api.http.errors import JsonResponse, install_handlers
from tandem.router.api.http.front import Front
from tandem.router.api.http.guard import PublicGuard, tell_refusal
from tandem.router.api.http.health import add_health_routes
from tandem.router.api.http.stream import EventStream, collect, first_delta, until_disconnect
from tandem.router.api.http.tokens import add_token_routes
from tandem.router.api.http.usage import add_usage_route
from tandem.router.api.openai.choices import generate_choices
from tandem.router.api.openai.fields import warning
from tandem.router.api.openai.openapi import ErrorReply, add_schemas, generation_route
from tandem.router.api.openai.replies import Replies
from tandem.router.api.openai.requests import (
    ChatBody,
    CompletionBody,
    ParsedRequest,
    drop_unknown_fields,
    parse_chat,
    parse_completion,
)
from tandem.router.api.openai.structured import Strict
from tandem.router.placement.reasons import PLACEMENT_HEADER, TIMING_HEADER, asks
from tandem.router.request.delta import Delta
from tandem.router.request.generator import Generator
from tandem.security.access import Access
from tandem.security.audit_trail import AuditTrail
from tandem.security.key_service import KeyService

Parse = Callable[[dict[str, Any], str], ParsedRequest]
_TRACE_HEADERS = ("traceparent", "tracestate")


def make_app(
    config: RouterConfig,
    generator: Generator,
    access: Access,
    keys: KeyService,
    trail: AuditTrail,
) -> FastAPI:
    app = FastAPI(
        title="Tandem",
        description="OpenAI's API on prefill and decode workers apart from each other",
        redirect_slashes=False,
        docs_url=None,  # these two pages would run scripts of another site
        redoc_url=None,
        responses={"default": {"description": "An error", "model": ErrorReply}},
    )
    install_handlers(app)
    add_schemas(app)
    app.add_middleware(PublicGuard, config=config, access=access, trail=trail)
    app.add_middleware(Front, config=config)  # the last one added is the first one called
    _add_generation(app, config, generator)
    _add_requests(app, generator, trail)
    add_token_routes(app, config, generator)
    _add_server(app, generator)
    _add_models(app, generator)
    add_usage_route(app, generator.tenants.usage)
    add_health_routes(app, generator)
    add_record_route(app, config, keys)
    return app


def _add_generation(app: FastAPI, config: RouterConfig, generator: Generator) -> None:
    async def serve(request: Request, parse: Parse, kind: type[Strict]) -> Response:
        body = await read_json_object(request, config)
        headers = request.headers
        request_id, client_id = request.state.request_id, request.state.client_id
        unknown = [] if config.strict_fields else drop_unknown_fields(kind, body)
        parsed = parse(body, request_id)
        tokenizer = generator.model.tokenizer if generator.model is not None else None
        replies = Replies(parsed, generator.served_name, tokenizer)
        named = headers.getlist(TENANT_HEADER)
        tenant = tenant_of(request.state.key, named, trusted=config.trust_tenant_header)
        limits = limits_of(request.state.key)
        asked = [
            replace(r, tenant=tenant, limits=limits, client_id=client_id) for r in parsed.requests
        ]
        trace = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
        deltas = generate_choices(generator, asked, trace)
        asks_timing = asks(headers.get(TIMING_HEADER))

        def answer_headers(last: Delta) -> dict[str, str]:
            own = dict(last.limit_headers)
            if unknown:
                own["warning"] = warning(unknown)
            if asks(headers.get(PLACEMENT_HEADER)):
                own[PLACEMENT_HEADER] = last.placement
            if last.timeline is not None and asks_timing:
                own["server-timing"] = last.timeline.server_timing()
            return own

        if parsed.stream:
            first = await first_delta(request, deltas)
            told = answer_headers(first.delta)
            return EventStream(first, deltas, replies, told, tells_timing=asks_timing)
        answer, last = await until_disconnect(request.receive, collect(deltas, replies))
        return JsonResponse(answer, headers=answer_headers(last))

    @app.post("/v1/completions", **generation_route(CompletionBody))
    async def completions(request: Request) -> Response:
        return await serve(request, parse_completion, CompletionBody)

    @app.post("/v1/chat/completions", **generation_route(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await serve(request, parse_chat, ChatBody)


def _add_requests(app: FastAPI, generator: Generator, trail: AuditTrail) -> None:
    @app.get("/v1/requests/{request_id}")
    async def request(request_id: str, request: Request) -> Response:
        requests, tenant = generator.requests, visible_tenant(request.state.key)
        if choices := requests.find_choices(request_id, tenant):
            told = {"id": request_id, "object": "list", "data": [r.as_dict() for r in choices]}
            return JsonResponse(told)
        try:
            return JsonResponse(requests.find(request_id, tenant).as_dict())
        except RequestNotFound as error:
            if requests.is_of_another(request_id, tenant):
                tell_refusal(trail, request.scope, error)
            raise


def _add_models(app: FastAPI, generator: Generator) -> None:
    def model_body() -> dict[str, Any]:
        return {
            "id": generator.served_name,
            "object": "model",
            "created": generator.model.created_s if generator.model else 0,
            "owned_by": "tandem",
            "root": generator.model.folder.name if generator.model else "",
            "parent": None,
            "max_model_len": generator.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        data = [model_body()] if generator.model is not None else []
        return JsonResponse({"object": "list", "data": data})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if generator.model is None or model != generator.served_name:
            raise ModelNotFound(
                f"the model {model[:80]!r} is not served here; {generator.served_name!r} is",
                param="model",
            )
        return JsonResponse(model_body())


def _add_server(app: FastAPI, generator: Generator) -> None:
    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": metadata.version("tandem-llm")})

    @app.get("/load")
    async def load() -> Response:
        """The number of open requests of this router, as vLLM reports it."""
        return JsonResponse({"server_load": generator.num_running})
