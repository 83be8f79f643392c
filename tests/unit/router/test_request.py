from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from tandem.common.kv_budget import KvBudget
from tandem.common.sampling_params import SamplingParams
from tandem.errors import BadRequest, ConfigError, ContextTooLong, ModelNotFound, OverKeyLimit
from tandem.models.grammars.text import StructuredOutput
from tandem.net.security.limits import Limits
from tandem.router.request.allowed import ALLOWED, refusal, rename
from tandem.router.request.conversation import Conversation, Message
from tandem.router.request.request import (
    MODEL_DEFAULTS,
    ClientRequest,
    check_model,
    is_alias,
    read_model_defaults,
)
from tests.harness.client_requests import client_request

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
BAD_SAMPLING = [
    ("temperature", -0.01),
    ("temperature", 2.01),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", -0.01),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("top_k", -2),
    ("top_k", 2**31),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 101.0),
    ("repetition_penalty", math.nan),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("min_tokens", -1),
    ("bad_words", [""]),
    ("bad_words", ["x" * 129]),
    ("bad_words", ["x"] * 129),
]


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING)
def test_sampling_out_of_range_names_the_field_and_the_range(name: str, value: float) -> None:
    with pytest.raises(BadRequest) as raised:
        SamplingParams(**{name: value})
    assert raised.value.param == name
    assert ALLOWED[name] in raised.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", ""),
        ("prompt", ()),
        ("messages", Conversation(())),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("stop", ["a"] * 257),
        ("stop", [""]),
        ("stop", ["x" * 1025]),
        ("stop_token_ids", [1] * 129),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
    ],
)
def test_request_out_of_range(name: str, value: object) -> None:
    field = "prompt" if name == "messages" else name
    with pytest.raises(BadRequest) as raised:
        client_request(**{"prompt": "x", field: value})
    assert raised.value.param == name
    assert ALLOWED[name] in raised.value.message


@pytest.mark.parametrize("role", ["<|im_end|>", "", "a user", "wizard" * 1000])
def test_impossible_role(role: str) -> None:
    with pytest.raises(BadRequest, match="system, user, assistant") as raised:
        Message(role, "x")
    assert len(raised.value.message) < 300


def check(request: ClientRequest) -> None:
    request.check_against(vocab_size=100, max_model_len=10)


def test_what_only_the_model_can_tell() -> None:
    check(ClientRequest(prompt=(0, 99)))
    with pytest.raises(BadRequest, match="0 to 99"):
        check(ClientRequest(prompt=(100,)))
    with pytest.raises(BadRequest, match="0 to 99"):
        check(client_request(prompt="x", stop_token_ids=[-1]))
    with pytest.raises(ContextTooLong, match="at most 9"):
        check(ClientRequest(prompt=(1,) * 10))
    with pytest.raises(ContextTooLong, match="at most 640") as raised:
        check(ClientRequest(prompt=Conversation((Message("user", "x" * 641),))))
    assert raised.value.param == "messages"


def test_another_model_is_named() -> None:
    check_model("tiny", served="tiny")
    check_model("", served="tiny")
    with pytest.raises(
        ModelNotFound, match="'TINY' is not served here; the served model is 'tiny'"
    ):
        check_model("TINY", served="tiny")


@pytest.mark.parametrize(
    ("alias", "names", "others"),
    [
        ("gpt-4o", ["gpt-4o"], ["gpt-4o-mini", "GPT-4o", "gpt-4"]),
        (
            "claude-*",
            ["claude-", "claude-haiku-4-5-20251001"],
            ["claude", "a-claude-b", "Claude-x"],
        ),
        ("*-mini", ["gpt-5-mini", "-mini"], ["gpt-5-mini-x", "mini"]),
        ("a*b*a", ["aba", "abba", "a.b.a"], ["ab", "aa", "ba", "abab"]),
        ("a*a", ["aa", "a\na"], ["a"]),
        ("*", ["anything", "a.b"], []),
        ("a.c", ["a.c"], ["abc"]),
    ],
)
def test_an_alias_names_the_model(alias: str, names: list[str], others: list[str]) -> None:
    for name in names:
        check_model(name, served="tiny", aliases=["never", alias])
    for name in others:
        with pytest.raises(ModelNotFound):
            check_model(name, served="tiny", aliases=["never", alias])


def test_an_alias_is_compared_in_linear_time() -> None:
    assert not is_alias("a" * 1_000_000, ["*a" * 20 + "*b"])


def test_a_top_p_of_0_is_greedy() -> None:
    resolved = SamplingParams(top_p=0.0).resolved(max_tokens=3)
    assert (resolved.temperature, resolved.top_p) == (0.0, 1.0)
    resolved = SamplingParams(top_p=0.5).resolved(max_tokens=3)
    assert (resolved.temperature, resolved.top_p) == (1.0, 0.5)


def test_a_prompt_is_not_truncated_for_more_tokens_than_the_context_has() -> None:
    for max_tokens, kept in ((1, 99), (60, 40), (99, 1), (100, 99), (32_000, 99), (None, 99)):
        request = client_request("x", max_tokens=max_tokens, truncate_prompt_tokens=-1)
        assert request.prompt_tokens_max(100) == kept


def test_completion_limit() -> None:
    request = ClientRequest(prompt="x")
    assert request.resolved_max_tokens(4, 10) == 6
    assert client_request(prompt="x", default_max_tokens=3).resolved_max_tokens(4, 10) == 3
    assert client_request(prompt="x", default_max_tokens=16).resolved_max_tokens(4, 10) == 6
    exact = client_request(prompt="x", max_tokens=6)
    assert exact.resolved_max_tokens(4, 10) == 6
    beyond = client_request(prompt="x", max_tokens=32_000, default_max_tokens=2)
    assert beyond.resolved_max_tokens(4, 10) == 6, "as many as the context has"
    assert beyond.resolved_max_tokens(4, 10, pool_tokens=8) == 4
    with pytest.raises(ContextTooLong, match="at most 9"):
        beyond.resolved_max_tokens(10, 10)
    needs = client_request(prompt="x", max_tokens=32_000, min_tokens=7)
    with pytest.raises(BadRequest, match="min_tokens is 7; it must be at most 6"):
        needs.resolved_max_tokens(4, 10)
    with pytest.raises(ContextTooLong, match="at most 9"):
        request.resolved_max_tokens(10, 10)
    with pytest.raises(BadRequest, match="without any token"):
        request.resolved_max_tokens(0, 10)


def test_a_completion_without_a_limit_leaves_room_in_the_pool() -> None:
    request = ClientRequest(prompt="a")
    assert request.resolved_max_tokens(10, 100, pool_tokens=64) == 54
    assert (
        request.resolved_max_tokens(70, 100, pool_tokens=64) == 1
    )  # the worker says it never fits
    assert request.resolved_max_tokens(10, 100) == 90


def test_tiny_temperatures_are_raised_and_zero_stays_greedy() -> None:
    assert SamplingParams(temperature=1e-30).resolved().temperature == 0.01
    assert SamplingParams(temperature=0).resolved().temperature == 0
    assert SamplingParams(temperature=0.7).resolved().temperature == 0.7


def test_a_model_has_defaults_of_its_own() -> None:
    values = {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 2, "do_sample": False}
    defaults = read_model_defaults(values)
    assert defaults == {"temperature": 0.6, "top_k": 20}
    omitted = MODEL_DEFAULTS - {"top_k", "min_p"}
    sent = client_request("a", top_k=5, min_p=0.1, omitted=omitted).with_defaults(defaults)
    assert sent.sampling == SamplingParams(temperature=0.6, top_k=5, min_p=0.1, max_tokens=None)
    whole = client_request("a", top_k=5)
    assert whole.with_defaults(defaults).sampling == whole.sampling
    beams = client_request("a", omitted=MODEL_DEFAULTS, use_beam_search=True)
    assert beams.with_defaults({"repetition_penalty": 1.1}) == beams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (5, -1, "0.6", True)),
        *(("top_k", value) for value in (2.5, False, "20", [])),
        *(("top_p", value) for value in (-0.1, 1.5, float("nan"))),
        *(("min_p", value) for value in (float("inf"), {})),
        ("repetition_penalty", 0),
    ],
)
def test_a_default_that_no_request_may_have_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*--generation-config none"):
        read_model_defaults({name: value})


def test_a_key_bounds_prompts_and_completions() -> None:
    limits = Limits(max_prompt_tokens=50, max_completion_tokens=20, tokens_per_minute=60)
    named = partial(client_request, prompt="x", limits=limits)
    assert named().resolved_max_tokens(10, 1000) == 20
    assert named().resolved_max_tokens(45, 1000) == 15
    assert named(default_max_tokens=16).resolved_max_tokens(10, 1000) == 16
    assert named(max_tokens=20).resolved_max_tokens(40, 1000) == 20
    for request, prompt, word in (
        (named(), 51, "at most 50"),
        (named(max_tokens=21), 10, "at most 20"),
        (named(max_tokens=20), 41, "at most 19"),
        (named(max_tokens=1, limits=Limits(tokens_per_minute=30)), 30, "at most 29"),
    ):
        with pytest.raises(OverKeyLimit, match=word):
            request.resolved_max_tokens(prompt, 1000)


def test_a_key_bounds_all_completions_together() -> None:
    named = partial(client_request, prompt="x", n=4)
    of_one = Limits(max_completion_tokens=20)
    of_all = Limits(tokens_per_minute=60)
    assert named(limits=of_one).resolved_max_tokens(10, 1000) == 5
    assert named(limits=of_all).resolved_max_tokens(20, 1000) == 10
    assert named(limits=of_all, best_of=8).resolved_max_tokens(20, 1000) == 5
    for request, prompt, says in (
        (named(max_tokens=6, limits=of_one), 10, "max_tokens is 6; it must be at most 5"),
        (named(limits=of_all), 57, "n is 4; it must be at most 3"),
        (named(limits=of_all, best_of=8), 53, "best_of is 8; it must be at most 7"),
    ):
        with pytest.raises(OverKeyLimit, match=says):
            request.resolved_max_tokens(prompt, 1000)


def test_beams_are_refused_with_fields_that_they_do_not_follow() -> None:
    refused: dict[str, dict[str, Any]] = {
        "presence_penalty": {"presence_penalty": 1.0},
        "frequency_penalty": {"frequency_penalty": 1.0},
        "repetition_penalty": {"repetition_penalty": 2.0},
        "logit_bias": {"logit_bias": {1: 1.0}},
        "min_tokens": {"min_tokens": 1},
        "bad_words": {"bad_words": ["x"]},
        "guided_regex": {"structured_output": StructuredOutput("guided_regex", "regex", "x")},
        "stop": {"stop": ["x"]},
        "stop_token_ids": {"stop_token_ids": [1]},
        "logprobs": {"logprobs": 0},
        "prompt_logprobs": {"prompt_logprobs": 0},
        "echo": {"echo": True},
        "kv_budget": {"kv_budget": KvBudget(8)},
        "tools": {"prompt": Conversation((Message("user", "x"),), tools=(TOOL,))},
    }
    client_request("x", n=16, use_beam_search=True, length_penalty=-10.0)
    for name, fields in refused.items():
        with pytest.raises(BadRequest, match=f"{name} cannot be used with use_beam_search") as got:
            client_request(**{"prompt": "x", "use_beam_search": True, **fields})
        assert got.value.param == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 17, "use_beam_search": True}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"n": 2, "best_of": 3, "use_beam_search": True}, "best_of"),
        ({"prompt": Conversation((Message("user", "x"),)), "best_of": 2}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"length_penalty": 10.5, "use_beam_search": True}, "length_penalty"),
        ({"length_penalty": float("nan"), "use_beam_search": True}, "length_penalty"),
    ],
)
def test_numbers_of_completions_out_of_range_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(BadRequest) as raised:
        client_request(**{"prompt": "x", **fields})
    assert raised.value.param == name


def test_no_tokens_are_only_for_an_echo_which_no_chat_has() -> None:
    assert client_request("x", max_tokens=0, echo=True).resolved_max_tokens(3, 10) == 0
    with pytest.raises(BadRequest) as raised:
        client_request(Conversation((Message("user", "x"),)), max_tokens=0, echo=True)
    assert raised.value.param == "max_tokens"


def test_min_tokens_are_at_most_max_tokens_or_its_default() -> None:
    assert client_request("x", min_tokens=5, max_tokens=5).resolved_max_tokens(3, 10) == 5
    with pytest.raises(BadRequest) as raised:
        client_request("x", min_tokens=5, max_tokens=4)
    assert raised.value.param == "min_tokens"
    with pytest.raises(BadRequest) as raised:
        client_request("x", min_tokens=5).resolved_max_tokens(6, 10)
    assert raised.value.param == "min_tokens"


def test_biased_tokens_are_of_the_vocabulary() -> None:
    request = client_request("x", logit_bias={50: 1.0})
    with pytest.raises(BadRequest) as raised:
        request.check_against(vocab_size=50, max_model_len=10)
    assert raised.value.param == "logit_bias"
    assert "49" in raised.value.message


@pytest.mark.parametrize(
    ("asked", "max_tokens", "kept"), [(None, None, None), (7, 3, 7), (-1, 3, 17), (-1, None, 19)]
)
def test_a_truncated_prompt_leaves_room(
    asked: int | None, max_tokens: int | None, kept: int | None
) -> None:
    request = client_request((1,) * 30, truncate_prompt_tokens=asked, max_tokens=max_tokens)
    assert request.prompt_tokens_max(20) == kept
    if kept is not None:
        request.check_against(vocab_size=5, max_model_len=20)


def test_a_refusal_takes_the_names_of_another_api() -> None:
    names = {"messages": "input", "prompt": "input"}
    error = rename(refusal("messages", "a list of 0"), names)
    assert error.param == "input"
    assert error.message.startswith("input must be a non-empty list of messages")
    long = ContextTooLong("the context is 8 tokens; the prompt has 9 tokens", param="prompt")
    renamed = rename(long, names)
    assert (type(renamed), renamed.param) == (ContextTooLong, "input")
    assert renamed.message == "the context is 8 tokens; the input has 9 tokens"
    other = refusal("seed", "x")
    assert rename(other, names) is other
