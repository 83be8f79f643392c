"""Routes of Anthropic's messages API and its token counting."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.anthropic.errors import PATH
from tandem.api.anthropic.replies import MessageReplies
from tandem.api.anthropic.requests import (
    HINT_NAMES,
    NAMES,
    CountTokensBody,
    MessagesBody,
    parse_count,
    parse_messages,
    without_effect,
)
from tandem.api.http.errors import JsonResponse
from tandem.api.http.stream import until_disconnect
from tandem.api.openai.fields import WITHOUT_EFFECT, warn
from tandem.api.openai.openapi import body_route, generation_route
from tandem.api.routes.generation import GenerationRoutes
from tandem.router.request.allowed import renamed


def add_message_routes(app: FastAPI, routes: GenerationRoutes) -> None:
    """Adds `POST /v1/messages` and `POST /v1/messages/count_tokens` to the app."""

    @app.post(PATH, **generation_route(MessagesBody))
    async def messages(request: Request) -> Response:
        """Continues a chat, as Anthropic's API does."""
        body, headers = await routes.read(request, MessagesBody)
        with renamed(NAMES):
            parsed = parse_messages(body, request.state.request_id)
            warn(headers, WITHOUT_EFFECT, without_effect(body))
            name = parsed.requests[0].model
            replies = MessageReplies(parsed, routes.model(request, name).name_of(name))
            return await routes.answer(
                request,
                parsed.requests,
                replies,
                headers,
                stream=parsed.stream,
                names=HINT_NAMES,
            )

    @app.post(f"{PATH}/count_tokens", **body_route(CountTokensBody))
    async def count_tokens(request: Request) -> Response:
        """Counts the tokens of a chat of Anthropic's API; no worker takes part."""
        body, headers = await routes.read(request, CountTokensBody)
        with renamed(NAMES):
            parsed = parse_count(body, request.state.request_id)
            (prepared,) = routes.with_caller(request, parsed.requests)
            warn(headers, WITHOUT_EFFECT, without_effect(body))
            generator = routes.model(request, prepared.model)
            async with generator.without_workers(prepared.tenant, prepared.limits) as limit_headers:
                counting = generator.tokenize(prepared)
                token_ids = await until_disconnect(request.receive, counting)
        return JsonResponse({"input_tokens": len(token_ids)}, headers={**limit_headers, **headers})
