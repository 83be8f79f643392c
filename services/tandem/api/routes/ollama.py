"""The routes of Ollama's API, which `--ollama-api` adds."""

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from tandem.api.http.errors import JsonResponse
from tandem.api.http.stream import until_disconnect
from tandem.api.ollama.models import API_VERSION, listed, running, shown
from tandem.api.ollama.replies import NDJSON, OllamaReplies, loaded
from tandem.api.ollama.requests import (
    HINT_NAMES,
    NAMES,
    TAG,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from tandem.api.openai.embeddings import (
    NAMES as EMBEDDING_NAMES,
)
from tandem.api.openai.embeddings import (
    EmbeddingsBody,
    check_dimensions,
    embed,
)
from tandem.api.openai.openapi import body_route, generation_route
from tandem.api.openai.requests import validate
from tandem.api.openai.structured import Strict
from tandem.api.routes.generation import GenerationRoutes
from tandem.errors import NoWorkers
from tandem.router.admission.tenants import limits_of
from tandem.router.request.allowed import renamed
from tandem.router.request.delta import Delta, normalized
from tandem.router.request.generator import Generator

BODIES = (
    *(OllamaChatBody, OllamaGenerateBody),
    *(OllamaEmbedBody, OllamaEmbeddingsBody, OllamaShowBody),
)


_Generation = OllamaChatBody | OllamaGenerateBody
_Embedding = OllamaEmbedBody | OllamaEmbeddingsBody
# Lists a model under these names.
_Entries = Callable[[Generator, Sequence[str]], list[dict[str, Any]]]
_AT_ONCE = (0, "0", "0s")  # values of `keep_alive` that ask to unload the model


def add_ollama_routes(app: FastAPI, routes: GenerationRoutes) -> None:
    """Adds the routes to the app."""

    async def read(request: Request, kind: type[Strict]) -> tuple[dict[str, Any], dict[str, str]]:
        """Reads a body. A tag `latest` of the model's name is left out, unless it is a part of the
        name."""
        sent, headers = await routes.read(request, kind)
        name = sent.get("model")
        limits = limits_of(request.state.key)
        known = {each for one in routes.models for each in routes.models.names(one, limits)}
        if isinstance(name, str) and name not in known:
            sent["model"] = name.removesuffix(TAG)
        return sent, headers

    async def generate(request: Request, kind: type[_Generation]) -> Response:
        sent, headers = await read(request, kind)
        keep_alive = sent.get("keep_alive")
        with renamed(NAMES):
            body = validate(kind, sent)
            is_chat = isinstance(body, OllamaChatBody)
            generator = routes.model(request, body.model)
            if body.is_empty:
                generator.adapter(body.model)
                reason = "unload" if keep_alive in _AT_ONCE else "load"
                answer = loaded(generator.name_of(body.model), reason, is_chat=is_chat)
                return JsonResponse(answer, headers=headers)
            parsed = body.parse(request.state.request_id)
            name = generator.name_of(body.model)
            replies = OllamaReplies(parsed, name, generator.tokenizer, is_chat=is_chat)
            if parsed.stream:
                headers = {**headers, "content-type": NDJSON}
            return await routes.answer(
                request, parsed.requests, replies, headers, stream=parsed.stream, names=HINT_NAMES
            )

    async def embeddings(
        request: Request, kind: type[_Embedding]
    ) -> tuple[str, list[Delta], dict[str, str]]:
        """Returns the model's name, a delta for each input, and response headers."""
        sent, headers = await read(request, kind)
        with renamed(EMBEDDING_NAMES):
            body = validate(EmbeddingsBody, validate(kind, sent).to_openai())
            generator = routes.model(request, body.model or "")
            check_dimensions(body.dimensions, generator)
            requests = body.to_requests(request.state.request_id)
            prepared = routes.with_caller(request, requests, is_whole=True)

            async def run() -> list[Delta]:
                async with aclosing(embed(generator, prepared, routes.trace(request))) as deltas:
                    return [delta async for delta in deltas]

            deltas = await until_disconnect(request.receive, run())
        return generator.name_of(body.model), deltas, {**deltas[-1].limit_headers, **headers}

    @app.post("/api/chat", **generation_route(OllamaChatBody))
    async def chat(request: Request) -> Response:
        """Continues a chat, as Ollama does. The default is a stream of lines of JSON."""
        return await generate(request, OllamaChatBody)

    @app.post("/api/generate", **generation_route(OllamaGenerateBody))
    async def complete(request: Request) -> Response:
        """Answers one prompt, as Ollama does. The default is a stream of lines of JSON."""
        return await generate(request, OllamaGenerateBody)

    @app.post("/api/embed", **body_route(OllamaEmbedBody))
    async def embed_inputs(request: Request) -> Response:
        """Returns the embedding of each input, as Ollama does."""
        began_s = time.monotonic()
        name, deltas, headers = await embeddings(request, OllamaEmbedBody)
        answer = {
            "model": name,
            "embeddings": [normalized(delta.embedding).tolist() for delta in deltas],
            "total_duration": round((time.monotonic() - began_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(delta.usage.prompt_tokens for delta in deltas),
        }
        return JsonResponse(answer, headers=headers)

    @app.post("/api/embeddings", **body_route(OllamaEmbeddingsBody))
    async def embed_prompt(request: Request) -> Response:
        """Returns the embedding of one prompt, as Ollama's older call does."""
        _, (delta,), headers = await embeddings(request, OllamaEmbeddingsBody)
        return JsonResponse({"embedding": normalized(delta.embedding).tolist()}, headers=headers)

    def of_all(request: Request, entries: _Entries) -> list[dict[str, Any]]:
        limits = limits_of(request.state.key)
        names = ((one, routes.models.names(one, limits)) for one in routes.models)
        return [entry for one, allowed in names for entry in entries(one, allowed)]

    @app.get("/api/tags")
    async def tags(request: Request) -> Response:
        """Lists the served models and their adapters, as Ollama does."""
        return JsonResponse({"models": of_all(request, listed)})

    @app.get("/api/ps")
    async def processes(request: Request) -> Response:
        """Lists the models in memory, as Ollama does: the served models and their adapters."""
        return JsonResponse({"models": of_all(request, running)})

    @app.post("/api/show", **body_route(OllamaShowBody))
    async def show(request: Request) -> Response:
        """Describes the model, as Ollama does."""
        sent, headers = await read(request, OllamaShowBody)
        body = validate(OllamaShowBody, sent)
        name = body.model or body.name
        generator = routes.model(request, name)
        if generator.model is None:
            raise NoWorkers("the model is not loaded yet", retry_after_s=1.0)
        generator.adapter(name)
        return JsonResponse(shown(generator, generator.model), headers=headers)

    @app.get("/")
    async def root() -> Response:
        """Says that the server runs, in Ollama's words. Its clients call this first."""
        return PlainTextResponse("Ollama is running")

    @app.get("/api/version")
    async def version() -> Response:
        """Returns the version of Ollama whose API this is, and that of Tandem."""
        return JsonResponse({"version": API_VERSION, "tandem": metadata.version("tandem-llm")})
