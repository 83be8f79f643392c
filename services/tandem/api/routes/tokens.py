"""Routes that convert text to token ids and back. The conversions wait in the same queue as the
prompts of other requests, in which tenants take turns."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.http.errors import JsonResponse
from tandem.api.http.stream import until_disconnect
from tandem.api.openai.openapi import body_route
from tandem.api.openai.requests import validate
from tandem.api.openai.tokens import (
    DetokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
    kind_of,
    parse_tokenize,
    tokenize_reply,
)
from tandem.api.routes.generation import GenerationRoutes
from tandem.router.admission.tenants import limits_of


def add_token_routes(app: FastAPI, routes: GenerationRoutes) -> None:
    """Adds `POST /tokenize` and `POST /detokenize` to the app."""

    @app.post("/tokenize", **body_route(TokenizePromptBody, TokenizeChatBody))
    async def tokenize(request: Request) -> Response:
        """Returns the tokens of a text or a chat."""
        body, headers = await routes.read(request, kind_of)
        parsed, prompts = parse_tokenize(body, routes.tenant(request))
        prepared = routes.with_caller(request, prompts)
        generator = routes.model(request, prepared[0].model)

        async def count() -> dict[str, Any]:
            # The prompts are tokenized one after another, so that other requests' prompts are
            # tokenized between them.
            tokens = [await generator.tokenize(each) for each in prepared]
            assert generator.model is not None
            spell = generator.model.tokenizer.tokens
            strings = [spell(ids) for ids in tokens] if parsed.return_token_strs else None
            return tokenize_reply(parsed, tokens, strings, max_model_len=generator.max_model_len)

        caller = prepared[0]
        async with generator.without_workers(
            caller.tenant, caller.limits, len(prepared)
        ) as limit_headers:
            answer = await until_disconnect(request.receive, count())
        return JsonResponse(answer, headers={**limit_headers, **headers})

    @app.post("/detokenize", **body_route(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Returns the text of tokens."""
        body, headers = await routes.read(request, DetokenizeBody)
        parsed = validate(DetokenizeBody, body)
        generator = routes.model(request, parsed.model)
        generator.adapter(parsed.model)
        tenant = routes.tenant(request)
        limits = limits_of(request.state.key)
        async with generator.without_workers(tenant, limits) as limit_headers:
            decoding = generator.detokenize(
                parsed.tokens, tenant=tenant, skip_special_tokens=parsed.skip_special_tokens
            )
            text = await until_disconnect(request.receive, decoding)
        return JsonResponse({"prompt": text}, headers={**limit_headers, **headers})
