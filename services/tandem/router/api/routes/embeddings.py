"""The route of OpenAI's embeddings."""

from collections.abc import Sequence
from contextlib import aclosing

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.router.api.http.errors import JsonResponse
from tandem.router.api.http.stream import until_disconnect
from tandem.router.api.openai.choices import generate_choices
from tandem.router.api.openai.embeddings import NAMES, EmbeddingsBody, embeddings_reply
from tandem.router.api.openai.openapi import body_route
from tandem.router.api.openai.requests import validate
from tandem.router.api.routes.generation import GenerationRoutes, renamed
from tandem.router.request.allowed import CHOICES_MAX
from tandem.router.request.delta import Delta
from tandem.router.request.request import ClientRequest


def add_embedding_route(app: FastAPI, routes: GenerationRoutes) -> None:
    """Adds /v1/embeddings."""
    generator = routes.generator

    async def embed(request: Request, asked: Sequence[ClientRequest]) -> list[Delta]:
        """Returns a delta for each request, as many at once as a completion may have prompts."""
        found: list[Delta] = []
        for start in range(0, len(asked), CHOICES_MAX):
            group = asked[start : start + CHOICES_MAX]
            by_index: dict[int, Delta] = {}
            deltas = generate_choices(generator, group, routes.trace(request))
            async with aclosing(deltas):
                async for index, delta in deltas:
                    by_index.setdefault(index, delta)
            found += [by_index[index] for index in range(len(group))]
        return found

    @app.post("/v1/embeddings", **body_route(EmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        sent, headers = await routes.read(request, EmbeddingsBody)
        with renamed(NAMES):
            body = validate(EmbeddingsBody, sent)
            if generator.model is not None:
                body.check_dimensions(generator.model.folder.config.hidden_size)
            requests = body.to_requests(request.state.request_id)
            asked = routes.of_caller(request, requests)
            deltas = await until_disconnect(request.receive, embed(request, asked))
        answer = embeddings_reply(body, generator.served_name, deltas)
        return JsonResponse(answer, headers={**deltas[-1].limit_headers, **headers})
