"""The input of a kept response, and what cannot be cancelled, with OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter
from tests.service.router.test_http import EOS, ids

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {"responses_kept": 4}
CALL: dict[str, Any] = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "now",
    "arguments": "{}",
}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}


async def kept(router: RunningRouter, asked: Any, **more: Any) -> Any:
    router.script(saying([*ids(router, "Hi!"), EOS], finish_reason="stop"))
    return await router.openai.responses.create(model="tiny", input=asked, **more)


async def test_input_items_are_those_of_the_request(router: RunningRouter) -> None:
    first = await kept(router, "What time is it?")
    asked = [CALL, RESULT, {"role": "user", "content": "Well?"}]
    second = await kept(router, asked, previous_response_id=first.id, instructions="Be brief.")
    list_items = router.openai.responses.input_items.list
    (only,) = (await list_items(first.id)).data
    assert (only.type, only.role, only.content[0].text) == ("message", "user", "What time is it?")
    found = [item async for item in list_items(second.id, order="asc")]
    assert [item.type for item in found] == ["function_call", "function_call_output", "message"]
    assert (found[0].call_id, found[1].output[0].text) == ("call_1", "noon")
    assert len({item.id for item in found}) == 3
    latest_first = [item async for item in list_items(second.id, limit=1)]
    assert latest_first == found[::-1]


async def test_pages_of_input_items(router: RunningRouter) -> None:
    made = await kept(router, [{"role": "user", "content": f"{n}"} for n in range(5)])
    path = f"/v1/responses/{made.id}/input_items"
    ids_of = []
    for query in ({"limit": "2"}, {"limit": "2", "order": "asc"}, {}):
        page = (await router.http.get(path, params=query)).json()
        assert (page["first_id"], page["last_id"]) == (
            page["data"][0]["id"],
            page["data"][-1]["id"],
        )
        assert page["has_more"] is bool(query)
        ids_of.append([item["id"] for item in page["data"]])
    whole = ids_of[2]
    assert ids_of[0] == whole[:2]
    assert ids_of[1] == whole[:2:-1]
    rest = await router.http.get(path, params={"after": whole[1]})
    assert [item["id"] for item in rest.json()["data"]] == whole[2:]
    for name, value in (
        ("limit", "0"),
        ("limit", "101"),
        ("limit", "x"),
        ("order", "up"),
        ("after", "msg_1"),
    ):
        refused = await router.http.get(path, params={name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_nothing_is_there_to_cancel(router: RunningRouter) -> None:
    made = await kept(router, "x")
    cancel = router.openai.responses.cancel
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await cancel(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await cancel("resp_1")
    with pytest.raises(openai.NotFoundError, match="not found"):
        await router.openai.responses.input_items.list("resp_1")
    assert (await router.openai.responses.retrieve(made.id)).id == made.id
