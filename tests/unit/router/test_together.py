from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tandem.errors import BadRequest
from tandem.router.request.conversation import Conversation, Message
from tandem.router.request.generator import BodyRequests
from tandem.router.request.request import ClientRequest
from tests.harness.client_requests import client_request

CHAT = Conversation((Message("user", "x"),))


def limited(request: ClientRequest, prompt: int, limit: int, most: int = 1000) -> int:
    return BodyRequests(logprobs_max=most).reserve_logprobs(request, prompt, limit)


@pytest.mark.parametrize(
    ("fields", "prompt", "limit", "num"),
    [
        ({"prompt_logprobs": 20}, 10, 5, 10 * 21),
        ({"prompt_logprobs": 0, "n": 4}, 10, 5, 4 * 10),
        ({"logprobs": 4, "is_whole": True, "max_tokens": 7}, 10, 7, 7 * 5),
        ({"logprobs": 4, "is_whole": True, "max_tokens": 7, "n": 3}, 10, 7, 3 * 7 * 5),
        ({"logprobs": 4, "max_tokens": 7, "n": 2, "best_of": 3}, 10, 7, 3 * 7 * 5),
        ({"logprobs": 1, "prompt_logprobs": 1, "is_whole": True, "max_tokens": 7}, 10, 7, 34),
    ],
)
def test_what_an_answer_holds_is_bounded(
    fields: dict[str, Any], prompt: int, limit: int, num: int
) -> None:
    request = client_request("x", **fields)
    assert limited(request, prompt, limit, num) == limit
    with pytest.raises(BadRequest, match=f"at least {num} .* at most {num - 1}, ") as raised:
        limited(request, prompt, limit, num - 1)
    assert raised.value.param in fields


def test_an_echo_is_refused_by_the_field_that_asks_for_it() -> None:
    with pytest.raises(BadRequest) as raised:
        limited(client_request("x", echo=True, logprobs=5, prompt_logprobs=5), 10, 1, 59)
    assert raised.value.param == "logprobs"


def test_what_is_sent_as_it_is_made_has_no_bound() -> None:
    for fields in ({"logprobs": 20}, {"is_whole": True}):
        assert limited(client_request("x", max_tokens=2000, **fields), 2000, 2000) == 2000


def test_a_completion_without_a_limit_gets_what_fits() -> None:
    chat = partial(client_request, CHAT, is_whole=True, logprobs=4)
    assert limited(chat(), 10, 2000) == 200
    assert limited(chat(n=2), 10, 2000) == 100
    assert limited(chat(prompt_logprobs=4), 100, 2000) == 100
    assert limited(chat(min_tokens=200), 10, 2000) == 200
    for request in (chat(prompt_logprobs=4), chat(min_tokens=201)):
        with pytest.raises(BadRequest, match="at most 1000, "):
            limited(request, 200, 2000)


def test_prompts_of_one_body_share_the_bound() -> None:
    together = BodyRequests(3, logprobs_max=1000)
    request = client_request("x", prompt_logprobs=3)
    assert together.reserve_logprobs(request, 125, 5) == 5
    assert together.reserve_logprobs(request, 125, 5) == 5
    with pytest.raises(BadRequest, match="at least 1004 "):
        together.reserve_logprobs(request, 1, 5)


async def test_requests_begin_when_all_are_prepared() -> None:
    together = BodyRequests(2, logprobs_max=1)
    first = asyncio.create_task(together.begin())
    await asyncio.sleep(0)
    assert not first.done()
    await together.begin()
    await first
