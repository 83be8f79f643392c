"""The route of OpenAI's embeddings API."""

from collections.abc import Sequence
from contextlib import aclosing

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.http.errors import JsonResponse
from tandem.api.http.stream import until_disconnect
from tandem.api.openai.embeddings import (
    NAMES,
    EmbeddingsBody,
    check_dimensions,
    embed,
    embeddings_reply,
)
from tandem.api.openai.openapi import body_route
from tandem.api.openai.requests import validate
from tandem.api.routes.generation import GenerationRoutes
from tandem.router.request.allowed import renamed
from tandem.router.request.delta import Delta
from tandem.router.request.generator import Generator
from tandem.router.request.request import ClientRequest


def add_embedding_route(app: FastAPI, routes: GenerationRoutes) -> None:
    """Adds `POST /v1/embeddings` to the app."""

    async def embed_all(
        request: Request, generator: Generator, prepared: Sequence[ClientRequest]
    ) -> list[Delta]:
        async with aclosing(embed(generator, prepared, routes.trace(request))) as deltas:
            return [delta async for delta in deltas]

    @app.post("/v1/embeddings", **body_route(EmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        """Returns the embedding of each input, as OpenAI's API does."""
        sent, headers = await routes.read(request, EmbeddingsBody)
        with renamed(NAMES):
            body = validate(EmbeddingsBody, sent)
            generator = routes.model(request, body.model or "")
            check_dimensions(body.dimensions, generator)
            requests = body.to_requests(request.state.request_id)
            prepared = routes.with_caller(request, requests)
            deltas = await until_disconnect(
                request.receive, embed_all(request, generator, prepared)
            )
        answer = embeddings_reply(body, generator.name_of(body.model or ""), deltas)
        return JsonResponse(answer, headers={**deltas[-1].limit_headers, **headers})
