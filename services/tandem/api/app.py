"""The public HTTP API: OpenAI's completions, chats and responses, Anthropic's messages, models,
request records and health.

This package only translates between HTTP and the router's own types: `router/request` validates
requests, and `Generator` runs them. Each API has its own classes for request bodies and replies.
The steps from a request body to a reply are the same for all APIs (`routes/generation.py`).
"""

from collections.abc import Callable
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.admin.keys import add_record_route
from tandem.api.anthropic.requests import CountTokensBody, MessagesBody
from tandem.api.http.errors import JsonResponse, install_handlers
from tandem.api.http.front import Front
from tandem.api.http.guard import PROBES, PublicGuard
from tandem.api.openai.batches import BatchBody
from tandem.api.openai.embeddings import EmbeddingsBody
from tandem.api.openai.openapi import ErrorReply, add_schemas, generation_route
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.replies import Replies
from tandem.api.openai.requests import (
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
)
from tandem.api.openai.scoring import ClassifyBody, RerankBody, ScoreBody
from tandem.api.openai.structured import Strict
from tandem.api.openai.tokens import DetokenizeBody, TokenizeChatBody, TokenizePromptBody
from tandem.api.responses.requests import ResponsesBody
from tandem.api.routes.batches import BatchService, LineCalls, add_batch_routes, add_refusals
from tandem.api.routes.embeddings import add_embedding_route
from tandem.api.routes.files import add_file_routes
from tandem.api.routes.generation import BodyKind, GenerationRoutes
from tandem.api.routes.health import add_health_routes
from tandem.api.routes.messages import add_message_routes
from tandem.api.routes.models import add_model_routes
from tandem.api.routes.ollama import BODIES as OLLAMA_BODIES
from tandem.api.routes.ollama import add_ollama_routes
from tandem.api.routes.requests import add_request_route
from tandem.api.routes.responses import add_response_routes
from tandem.api.routes.scoring import add_scoring_routes
from tandem.api.routes.tokens import add_token_routes
from tandem.api.routes.usage import add_usage_route
from tandem.common.config.router import RouterConfig
from tandem.net.security.access import Access
from tandem.net.security.audit_trail import AuditTrail
from tandem.net.security.key_service import KeyService
from tandem.net.store.client import Client
from tandem.router.metrics.http import HttpMetrics
from tandem.router.request.models import Models

Parse = Callable[[dict[str, Any], str], ParsedRequest]
_BODIES = (
    *(CompletionBody, ChatBody, MessagesBody, CountTokensBody, ResponsesBody),
    *(BatchBody, EmbeddingsBody, RerankBody, ScoreBody, ClassifyBody),
    *(TokenizePromptBody, TokenizeChatBody, DetokenizeBody),
)


def make_app(
    config: RouterConfig,
    models: Models,
    access: Access,
    keys: KeyService,
    trail: AuditTrail,
    redis: Client,
    batches: BatchService | None = None,
) -> FastAPI:
    """Builds the app of the public HTTP port. With `--api grpc` it serves only health probes and
    calls from other routers."""
    app = FastAPI(
        title="Tandem",
        description="OpenAI's API, served by separate prefill and decode workers",
        redirect_slashes=False,
        docs_url=None,  # FastAPI's documentation pages are off: they load scripts of another site.
        redoc_url=None,
        responses={"default": {"description": "An error", "model": ErrorReply}},
    )
    install_handlers(app)
    add_schemas(app, *_BODIES, *(OLLAMA_BODIES if config.ollama_api else ()))
    app.add_middleware(PublicGuard, config=config, access=access, trail=trail)
    app.add_middleware(HttpMetrics, metrics=models.first.metrics, uncounted=PROBES)
    # Starlette runs the middleware in the reverse order: the one that was added last runs first.
    app.add_middleware(Front, config=config, models=models)
    if config.api != "grpc":
        _add_api(app, config, models, trail, redis, batches)
    add_health_routes(app, models)
    add_record_route(app, config, keys, trail)
    return app


def _add_api(
    app: FastAPI,
    config: RouterConfig,
    models: Models,
    trail: AuditTrail,
    redis: Client,
    batches: BatchService | None,
) -> None:
    routes = GenerationRoutes(config, models)

    def add_line_routes(to: FastAPI) -> None:
        _add_generation(to, routes)
        add_response_routes(to, routes, trail, redis)
        add_embedding_route(to, routes)

    add_line_routes(app)
    add_message_routes(app, routes)
    if batches is not None:
        add_file_routes(app, routes, batches.files, batches.batches)
        add_batch_routes(app, routes, batches.files, batches.batches)
        batches.runner.call = LineCalls(add_line_routes, models, batches)
    add_refusals(app, has_files=batches is not None)
    add_scoring_routes(app, routes)
    if config.ollama_api:
        add_ollama_routes(app, routes)
    add_request_route(app, models, trail)
    add_token_routes(app, routes)
    _add_server(app, models)
    add_model_routes(app, models)
    add_usage_route(app, models.first)


def _add_generation(app: FastAPI, routes: GenerationRoutes) -> None:
    async def serve(request: Request, parse: Parse, kind: BodyKind) -> Response:
        body, headers = await routes.read(request, kind)
        parsed = parse(body, request.state.request_id)
        name = parsed.requests[0].model
        generator = routes.model(request, name)
        replies = Replies(parsed, generator.name_of(name), generator.tokenizer)
        return await routes.answer(request, parsed.requests, replies, headers, stream=parsed.stream)

    @app.post("/v1/completions", **generation_route(CompletionBody))
    async def completions(request: Request) -> Response:
        """Completes one prompt or up to 128 prompts, as OpenAI's API does."""
        return await serve(request, parse_completion, CompletionBody)

    @app.post("/v1/chat/completions", **generation_route(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Continues a chat, as OpenAI's API does."""
        return await serve(request, parse_chat, ChatBody)

    def kind_of(body: dict[str, Any]) -> type[Strict]:
        return ChatBody if "messages" in body else CompletionBody

    def parse_either(body: dict[str, Any], request_id: str) -> ParsedRequest:
        parse = parse_chat if "messages" in body else parse_completion
        return parse(body, request_id)

    @app.post("/invocations", **generation_route(ChatBody, CompletionBody))
    async def invocations(request: Request) -> Response:
        """Answers a chat or a completion. SageMaker calls its models at this path."""
        return await serve(request, parse_either, kind_of)


def _add_server(app: FastAPI, models: Models) -> None:
    @app.get("/version")
    async def version() -> Response:
        """Returns the version of Tandem."""
        return JsonResponse({"version": metadata.version("tandem-llm")})

    @app.get("/load")
    async def load() -> Response:
        """Returns the number of open requests of this router, as vLLM does."""
        return JsonResponse({"server_load": models.num_running})
