"""The chat of the operators' page: a chat as on the public port, with an operator's key.

The page may call its own origin only, so the admin listener takes its chats itself. The guard asks
for an operator's key, a body of `application/json` and no foreign `Origin`, as for every change.
"""

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.openai.replies import Replies
from tandem.api.openai.requests import ChatBody, parse_chat
from tandem.api.routes.generation import GenerationRoutes
from tandem.common.config.router import RouterConfig
from tandem.router.request.generator import Generator

CHAT_PATH = "/v1/cluster/chat"


def add_chat_route(app: FastAPI, config: RouterConfig, generator: Generator) -> None:
    routes = GenerationRoutes(config, generator)

    @app.post(CHAT_PATH)
    async def chat(request: Request) -> Response:
        """Answers a chat as /v1/chat/completions of the public port does."""
        request.state.request_id, request.state.client_id = uuid.uuid4().hex, ""
        body, headers = await routes.read(request, ChatBody)
        parsed = parse_chat(body, request.state.request_id)
        replies = Replies(parsed, generator.name_of(parsed.requests[0].model), routes.tokenizer)
        return await routes.answer(request, parsed.requests, replies, headers, stream=parsed.stream)
