"""Routes of OpenAI's responses API, including those for kept responses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from tandem.api.http.errors import JsonResponse
from tandem.api.http.guard import log_refusal
from tandem.api.openai.fields import warn
from tandem.api.openai.openapi import generation_route
from tandem.api.openai.requests import validate
from tandem.api.responses.input_items import items_with_ids, page_of
from tandem.api.responses.items import Item, Items, to_messages
from tandem.api.responses.kept import KeptResponse, KeptResponses
from tandem.api.responses.replies import ResponseReplies
from tandem.api.responses.requests import (
    NAMES,
    ResponsesBody,
    drop_tools,
    parse_response,
)
from tandem.api.routes.generation import GenerationRoutes
from tandem.errors import BadRequest, ResponseNotFound
from tandem.net.security.audit_trail import AuditTrail
from tandem.router.request.allowed import renamed

_PATH = "/v1/responses"
_ITEMS: TypeAdapter[Sequence[Item]] = TypeAdapter(Items)


def add_response_routes(app: FastAPI, routes: GenerationRoutes, trail: AuditTrail) -> None:
    """Adds `POST /v1/responses`, and the routes that read or delete a kept response."""
    kept = KeptResponses(routes.config.responses_kept)

    @app.post(_PATH, **generation_route(ResponsesBody))
    async def responses(request: Request) -> Response:
        """Answers an input, as OpenAI's Responses API does."""
        sent, headers = await routes.read(request, ResponsesBody)
        if not routes.config.strict_fields:
            warn(headers, "tools that are not functions are ignored", drop_tools(sent))
        tenant = routes.tenant(request)
        with renamed(NAMES):
            body = validate(ResponsesBody, sent)
            earlier = kept.messages_of(body.previous_response_id, tenant)
            parsed = parse_response(body, earlier, request.state.request_id)
            (prepared,) = parsed.chat.requests
            prepared = routes.generator.with_defaults(prepared)
            parsed = replace(parsed, chat=replace(parsed.chat, requests=(prepared,)))

            def keep(response: dict[str, Any]) -> None:
                said = to_messages(_ITEMS.validate_python(response["output"]))
                messages = (*parsed.messages, *said)
                items = items_with_ids(body.input)
                kept.keep(response["id"], KeptResponse.of(tenant, response, messages, items))

            replies = ResponseReplies(
                parsed,
                routes.generator.name_of(prepared.model),
                routes.tokenizer,
                keep=keep if kept.is_on and body.store is not False else None,
            )
            return await routes.answer(
                request, parsed.chat.requests, replies, headers, stream=body.stream
            )

    def refuse_another(request: Request, response_id: str, error: ResponseNotFound) -> None:
        if kept.is_of_another(response_id, routes.tenant(request)):
            log_refusal(trail, request.scope, error)

    def find(request: Request, response_id: str) -> KeptResponse:
        try:
            return kept.find(response_id, routes.tenant(request))
        except ResponseNotFound as error:
            refuse_another(request, response_id, error)
            raise

    @app.get(f"{_PATH}/{{response_id}}")
    async def retrieve(response_id: str, request: Request) -> Response:
        """Returns a kept response."""
        if request.query_params.get("stream", "false") != "false":
            raise BadRequest(
                "a stored response cannot be streamed; set the query parameter stream to false, or "
                "leave it out",
                param="stream",
            )
        return Response(find(request, response_id).body, media_type=JsonResponse.media_type)

    @app.get(f"{_PATH}/{{response_id}}/input_items")
    async def input_items(response_id: str, request: Request) -> Response:
        """Lists the input of a kept response."""
        items = msgspec.json.decode(find(request, response_id).input_items)
        return JsonResponse(page_of(items, request.query_params))

    @app.post(f"{_PATH}/{{response_id}}/cancel")
    async def cancel(response_id: str, request: Request) -> Response:
        """Refuses to cancel: only responses in the background could be cancelled."""
        find(request, response_id)
        # This is OpenAI's exact wording, which some clients search for.
        raise BadRequest("Cannot cancel a synchronous response.", param="response_id")

    @app.delete(f"{_PATH}/{{response_id}}")
    async def delete(response_id: str, request: Request) -> Response:
        """Deletes a kept response."""
        try:
            kept.delete(response_id, routes.tenant(request))
        except ResponseNotFound as error:
            refuse_another(request, response_id, error)
            raise
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})
