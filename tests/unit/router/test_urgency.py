"""Clients say how urgent a request is, in every API, and an API key limits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tandem.api.anthropic.requests import parse_messages
from tandem.api.grpc.inference import parse_request
from tandem.api.openai.requests import (
    ChatBody,
    drop_unknown_fields,
    parse_chat,
    parse_completion,
    validate,
)
from tandem.api.responses.requests import ResponsesBody, parse_response
from tandem.errors import BadRequest
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.security.limits import NO_LIMITS, Limits, changed
from tandem.router.admission.turns import Claim
from tandem.router.request.request import ClientRequest
from tandem.router.request.urgency import waiting_of

USER = {"role": "user", "content": "Hello!"}


def priority(**fields: Any) -> int:
    """Returns the priority of a request with these fields, which is the same in all APIs of
    OpenAI."""
    (chat,) = parse_chat({"messages": [USER], **fields}, "id").requests
    (completion,) = parse_completion({"prompt": "Hello!", **fields}, "id").requests
    body = validate(ResponsesBody, {"input": "Hello!", **fields})
    (response,) = parse_response(body, (), "id").chat.requests
    assert chat.priority == completion.priority == response.priority
    return chat.priority


def test_a_lower_priority_is_earlier_as_in_vllm_and_a_higher_hint_as_in_dynamo() -> None:
    assert priority() == 0
    assert priority(priority=-3) == -3
    assert priority(nvext={"agent_hints": {"priority": 5}}) == -5
    assert priority(nvext={"agent_hints": {"priority": 5}}, priority=2) == 2
    assert priority(nvext={"agent_hints": {}}) == priority(nvext={}) == 0


def test_messages_and_grpc_take_a_priority() -> None:
    (message,) = parse_messages({"messages": [USER], "max_tokens": 5, "priority": 4}, "id").requests
    assert message.priority == 4
    asked = pb.GenerateRequest(text="Hello!", priority=-4)
    assert parse_request(asked.SerializeToString()).priority == -4


@pytest.mark.parametrize("value", [2**31, -(2**31), 0.5, "high", True])
def test_other_priorities_are_refused(value: object) -> None:
    with pytest.raises(BadRequest, match=r"priority .*must be an integer from -2147483647 to"):
        parse_chat({"messages": [USER], "priority": value}, "id")


def test_other_hints_of_dynamo_are_named_or_ignored() -> None:
    nvext = {"agent_hints": {"priority": 1, "osl": 9}, "annotations": ["x"]}
    body = {"messages": [USER], "nvext": nvext}
    assert drop_unknown_fields(ChatBody, body) == ["nvext.annotations"]
    assert parse_chat(body, "id").requests[0].priority == -1


def test_a_key_limits_the_priority_and_may_shed() -> None:
    limits = changed(NO_LIMITS, {"earliest_priority": 0, "may_shed": True})
    request = ClientRequest("x", priority=-5, tenant="a", session="s", limits=limits)
    assert request.claim == Claim("a", weight=100, session="s", priority=0, may_shed=True)
    assert ClientRequest("x", priority=5, limits=limits).claim.priority == 5
    assert ClientRequest("x", priority=-5, limits=Limits(may_shed=False)).claim.priority == -5
    with pytest.raises(BadRequest, match="earliest_priority"):
        changed(NO_LIMITS, {"earliest_priority": 2**40})


def sent(**headers: Sequence[str]) -> Any:
    return lambda name: headers.get(name.removeprefix("x-tandem-").replace("-", "_"), ())


def test_headers_set_a_deadline_and_allow_shedding() -> None:
    assert waiting_of(sent()) == {}
    assert waiting_of(sent(deadline_ms=[" 1500 "], may_shed=["1"])) == {
        "deadline_s": 1.5,
        "may_shed": True,
    }
    assert waiting_of(sent(may_shed=["False"])) == {"may_shed": False}


@pytest.mark.parametrize(
    "headers",
    [{"deadline_ms": [value]} for value in ("", "0", "-1", "1.5", "9" * 400, "86400001", "²")]
    + [{"deadline_ms": ["1".zfill(9) + "9" * length]} for length in (4, 500, 5000)]
    + [{"may_shed": ["maybe"]}],
)
def test_other_values_of_these_headers_are_refused(headers: dict[str, list[str]]) -> None:
    with pytest.raises(BadRequest, match="the header x-tandem-"):
        waiting_of(sent(**headers))
