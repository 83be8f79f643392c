"""The routes that score texts: rerank, score and classify."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.http.errors import JsonResponse
from tandem.api.http.stream import until_disconnect
from tandem.api.openai.embeddings import NAMES, embed
from tandem.api.openai.openapi import body_route
from tandem.api.openai.requests import validate
from tandem.api.openai.scoring import (
    ClassifyBody,
    RerankBody,
    ScoreBody,
    classify_reply,
    naming_prompts,
    rerank_reply,
    score_reply,
)
from tandem.api.routes.generation import GenerationRoutes
from tandem.errors import NoWorkers
from tandem.models.scoring import Scorer
from tandem.router.request.allowed import renamed
from tandem.router.request.delta import Delta
from tandem.router.request.generator import Generator, Task
from tandem.router.request.request import ClientRequest

_Reply = Callable[[Scorer, str, str, Sequence[Delta]], dict[str, Any]]


def add_scoring_routes(app: FastAPI, routes: GenerationRoutes) -> None:
    """Adds the routes of rerank, score and classify, each also under vLLM's other paths."""

    def scorer_for(generator: Generator, task: Task) -> Scorer:
        """Returns the model's head. Raises BadRequest if the model has none for this task."""
        if generator.model is None:
            raise NoWorkers("the model is not loaded yet", retry_after_s=1.0)
        generator.model.check_task(task)
        assert generator.model.scorer is not None
        return generator.model.scorer

    async def answer(
        request: Request,
        requests: Sequence[ClientRequest],
        headers: dict[str, str],
        reply: Callable[[str, str, Sequence[Delta]], dict[str, Any]],
    ) -> Response:
        prepared = routes.with_caller(request, requests, is_whole=True)
        generator = routes.model(request, requests[0].model)

        async def run() -> list[Delta]:
            async with aclosing(embed(generator, prepared, routes.trace(request))) as deltas:
                return [delta async for delta in deltas]

        deltas = await until_disconnect(request.receive, run())
        name = generator.name_of(requests[0].model)
        body = reply(name, request.state.request_id, deltas)
        return JsonResponse(body, headers={**deltas[-1].limit_headers, **headers})

    @app.post("/v1/rerank", **body_route(RerankBody))
    @app.post("/v2/rerank", **body_route(RerankBody))
    @app.post("/rerank", **body_route(RerankBody))
    async def rerank(request: Request) -> Response:
        """Orders documents by how well they answer a query, as Jina's and Cohere's APIs do."""
        sent, headers = await routes.read(request, RerankBody)
        body = validate(RerankBody, sent)
        scorer = scorer_for(routes.model(request, body.model or ""), "score")
        requests = body.to_requests(scorer, request.state.request_id)
        with naming_prompts("documents"):
            return await answer(
                request,
                requests,
                headers,
                lambda *of: rerank_reply(body, scorer, *of),
            )

    @app.post("/v1/score", **body_route(ScoreBody))
    @app.post("/score", **body_route(ScoreBody))
    async def score(request: Request) -> Response:
        """Scores pairs of texts, as vLLM does."""
        sent, headers = await routes.read(request, ScoreBody)
        body = validate(ScoreBody, sent)
        scorer = scorer_for(routes.model(request, body.model or ""), "score")
        requests = body.to_requests(scorer, request.state.request_id)
        with naming_prompts("text_2"):
            return await answer(
                request, requests, headers, lambda *of: score_reply(body, scorer, *of)
            )

    @app.post("/v1/classify", **body_route(ClassifyBody))
    @app.post("/classify", **body_route(ClassifyBody))
    async def classify(request: Request) -> Response:
        """Classifies texts, as vLLM does."""
        sent, headers = await routes.read(request, ClassifyBody)
        with renamed(NAMES):
            body = validate(ClassifyBody, sent)
            scorer = scorer_for(routes.model(request, body.model or ""), "classify")
            requests = body.to_requests(request.state.request_id)
            return await answer(
                request, requests, headers, lambda *of: classify_reply(body, scorer, *of)
            )
