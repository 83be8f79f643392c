"""Fields and calls that clients of other servers use, beyond one question and its answer."""

from __future__ import annotations

import json
import re

import openapi_spec_validator
import pytest

from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter
from tests.service.router.test_http import CHAT, EOS, ids

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


async def test_a_dumped_answer_goes_back_into_the_conversation(router: RunningRouter) -> None:
    router.script(saying([*ids(router, "Hi!"), EOS], finish_reason="stop"))
    create = router.openai.chat.completions.create
    said = (await create(model="tiny", messages=CHAT)).choices[0].message.model_dump()
    assert (said["content"], said["tool_calls"]) == ("Hi!", None)
    messages = [*CHAT, said, {"role": "user", "content": "Bye!"}]
    assert (await create(model="tiny", messages=messages)).choices[0].message.content == "Hi!"


async def test_continuous_usage_as_benchmarks_ask_for_it(router: RunningRouter) -> None:
    router.script(saying(ids(router, " one two three")))
    stream = await router.openai.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    # A chunk may have several tokens.
    output_token_ids = [c.usage.completion_tokens async for c in stream]
    assert output_token_ids == sorted(output_token_ids)
    assert output_token_ids[-2:] == [3, 3]


async def test_openapi_is_a_valid_document(router: RunningRouter) -> None:
    document = (await router.http.get("/openapi.json")).json()
    openapi_spec_validator.validate(document)
    schemas = document["components"]["schemas"]
    # The validator does not follow references inside schemas.
    referred = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert referred <= schemas.keys()
    assert {"ChatBody", "ChatMessage", "CompletionBody", "ErrorReply", "StreamOptions"} <= referred
    for name, path in (("CompletionBody", "completions"), ("ChatBody", "chat/completions")):
        route = document["paths"][f"/v1/{path}"]["post"]
        body = route["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert set(route["responses"]) == {"200", "default"}
