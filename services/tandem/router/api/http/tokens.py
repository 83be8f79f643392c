"""Routes that turn text into token ids and back, by the fair executor that prompts go through."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.config.router import RouterConfig
from tandem.router.admission.tenants import TENANT_HEADER, tenant_of
from tandem.router.api.http.body import read_json_object
from tandem.router.api.http.errors import JsonResponse
from tandem.router.api.http.stream import until_disconnect
from tandem.router.api.openai.fields import warning
from tandem.router.api.openai.openapi import body_route
from tandem.router.api.openai.requests import drop_unknown_fields, validate
from tandem.router.api.openai.tokens import (
    DetokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
    kind_of,
    parse_tokenize,
    tokenize_reply,
)
from tandem.router.request.generator import Generator
from tandem.router.request.request import check_model


def add_token_routes(app: FastAPI, config: RouterConfig, generator: Generator) -> None:
    """Adds /tokenize and /detokenize."""

    def tenant(request: Request) -> str:
        named = request.headers.getlist(TENANT_HEADER)
        return tenant_of(request.state.key, named, trusted=config.trust_tenant_header)

    @app.post("/tokenize", **body_route(TokenizePromptBody, TokenizeChatBody))
    async def tokenize(request: Request) -> Response:
        body = await read_json_object(request, config)
        unknown = [] if config.strict_fields else drop_unknown_fields(kind_of(body), body)
        parsed, asked = parse_tokenize(body, tenant(request))

        async def count() -> dict[str, Any]:
            tokens = [await generator.tokenize(each) for each in asked]  # one job at a time
            assert generator.model is not None
            spell = generator.model.tokenizer.tokens
            strings = [spell(ids) for ids in tokens] if parsed.return_token_strs else None
            return tokenize_reply(parsed, tokens, strings, max_model_len=generator.max_model_len)

        answer = await until_disconnect(request.receive, count())
        return JsonResponse(answer, headers={"warning": warning(unknown)} if unknown else None)

    @app.post("/detokenize", **body_route(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await read_json_object(request, config)
        unknown = [] if config.strict_fields else drop_unknown_fields(DetokenizeBody, body)
        parsed = validate(DetokenizeBody, body)
        check_model(parsed.model, served=generator.served_name)
        decoding = generator.detokenize(
            parsed.tokens, tenant=tenant(request), skip_special_tokens=parsed.skip_special_tokens
        )
        text = await until_disconnect(request.receive, decoding)
        # vLLM's clients read `prompt`, SGLang's `text`.
        headers = {"warning": warning(unknown)} if unknown else None
        return JsonResponse({"prompt": text, "text": text}, headers=headers)
