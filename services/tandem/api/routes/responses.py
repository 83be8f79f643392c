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
from tandem.api.openai.openapi import generation_route
from tandem.api.openai.paging import page_of
from tandem.api.openai.requests import validate
from tandem.api.responses.input_items import items_with_ids
from tandem.api.responses.items import Item, Items, to_messages
from tandem.api.responses.kept import KeptResponse
from tandem.api.responses.replies import ResponseReplies
from tandem.api.responses.requests import HINT_NAMES, NAMES, ResponsesBody, parse_response
from tandem.api.responses.store import ResponseStore
from tandem.api.routes.generation import GenerationRoutes
from tandem.errors import BadRequest, ResponseNotFound
from tandem.net.security.audit_trail import AuditTrail
from tandem.net.store.client import Client
from tandem.router.request.allowed import renamed

_PATH = "/v1/responses"
_ITEMS: TypeAdapter[Sequence[Item]] = TypeAdapter(Items)


def add_response_routes(
    app: FastAPI, routes: GenerationRoutes, trail: AuditTrail, redis: Client
) -> None:
    """Adds `POST /v1/responses`, and the routes that read or delete a kept response."""
    config = routes.config
    store = ResponseStore(
        redis, config.cluster.cluster_id, config.responses_kept, config.body_bytes_max
    )

    @app.post(_PATH, **generation_route(ResponsesBody))
    async def responses(request: Request) -> Response:
        """Answers an input, as OpenAI's Responses API does."""
        sent, headers = await routes.read(request, ResponsesBody)
        tenant = routes.tenant(request)
        with renamed(NAMES):
            await store.put_items(sent, tenant)
            body = validate(ResponsesBody, sent)
            earlier = await store.messages_of(body.previous_response_id, tenant)
            parsed = parse_response(body, earlier, request.state.request_id)
            (prepared,) = parsed.chat.requests
            generator = routes.model(request, prepared.model)
            prepared = generator.with_defaults(prepared)
            parsed = replace(parsed, chat=replace(parsed.chat, requests=(prepared,)))
            ended: list[dict[str, Any]] = []

            async def keep() -> None:
                for response in ended:
                    said = to_messages(
                        _ITEMS.validate_python(response["output"]), parsed.tools.names
                    )
                    messages = (*parsed.messages, *said)
                    items = items_with_ids(body.input, parsed.chat.request_id)
                    kept = KeptResponse.of(tenant, response, messages, items)
                    await store.keep(response["id"], kept)

            replies = ResponseReplies(
                parsed,
                generator.name_of(prepared.model),
                generator.tokenizer,
                keep=ended.append if store.is_on and body.store is not False else None,
            )
            return await routes.answer(
                request,
                parsed.chat.requests,
                replies,
                headers,
                stream=body.stream,
                names=HINT_NAMES,
                before_end=keep,
            )

    async def find(request: Request, response_id: str) -> KeptResponse:
        tenant = routes.tenant(request)
        try:
            return await store.find(response_id, tenant)
        except ResponseNotFound as error:
            if await store.is_of_another(response_id, tenant):
                log_refusal(trail, request.scope, error)
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
        found = await find(request, response_id)
        return Response(found.body, media_type=JsonResponse.media_type)

    @app.get(f"{_PATH}/{{response_id}}/input_items")
    async def input_items(response_id: str, request: Request) -> Response:
        """Lists the input of a kept response."""
        items = msgspec.json.decode((await find(request, response_id)).input_items)
        return JsonResponse(page_of(items, request.query_params, what="an input item"))

    @app.post(f"{_PATH}/{{response_id}}/cancel")
    async def cancel(response_id: str, request: Request) -> Response:
        """Refuses to cancel: only responses in the background could be cancelled."""
        await find(request, response_id)
        # This is OpenAI's exact wording, which some clients search for.
        raise BadRequest("Cannot cancel a synchronous response.", param="response_id")

    @app.delete(f"{_PATH}/{{response_id}}")
    async def delete(response_id: str, request: Request) -> Response:
        """Deletes a kept response."""
        await find(request, response_id)
        await store.delete(response_id, routes.tenant(request))
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})
