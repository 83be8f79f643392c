"""Where the time of a request went, in words."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.api.admin.request_text import longest_stage, prefill_choice

CREATED = 1_000_000.0


def request(name: str = "r", at_s: float = 0.0, tokens: int = 100, **facts: Any) -> dict[str, Any]:
    return {
        "id": name,
        "created": CREATED + at_s,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-1",
        "transport": "nixl",
        "blocks_pulled": 6,
        "first_decode_worker": "decode-1",
        "worker_queue_ms": 1900.0,
        "prefill_queue_ms": 0.0,
        "shared_wait_ms": 0.0,
        "tokens_ahead": 0,
        "local_prefill_ms": 0.0,
        "remote_prefill_ms": 0.0,
        "moves": 0,
        "workers_lost": 0,
        "usage": {"prompt_tokens": tokens, "cached_tokens": 0, "completion_tokens": 8},
        "stages_ms": {},
        **facts,
    }


def waiting(**facts: Any) -> dict[str, Any]:
    """A request that waited from 10 ms to 1,910 ms after CREATED."""
    return request(stages_ms={"tokenize": 10.0, "queue": 1900.0, "prefill": 300.0}, **facts)


def computed(name: str, at_s: float, tokens: int, **facts: Any) -> dict[str, Any]:
    """A request whose prompt was computed in the second after `at_s`."""
    return request(name, at_s, tokens, stages_ms={"prefill": 1000.0}, **facts)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([], "waiting for prefill-0"),
        ([("a", 0.0, 200), ("b", 1.0, 300)], "which computed 2 longer prompts"),
        ([("a", 0.0, 200)], "which computed 1 longer prompt"),
        ([("a", 0.0, 200), ("b", 1.0, 50)], "which computed 2 other prompts, 1 of them longer"),
        ([("a", 0.0, 50)], "which computed 1 other prompt"),
        ([("a", -1.0, 200), ("b", 1.9, 200)], "waiting for prefill-0"),  # before and afterwards
    ],
)
def test_a_wait_names_what_the_worker_computed_meanwhile(
    others: list[tuple[str, float, int]], why: str
) -> None:
    mine = waiting()
    told = longest_stage(mine, [mine, *(computed(*other) for other in others)])
    assert told.startswith("1.9 s waiting for prefill-0")
    assert told.endswith(why)


def test_prompts_of_another_worker_explain_no_wait() -> None:
    elsewhere = computed("a", 0.0, 200, prefill_worker="prefill-1")
    here = computed("b", 0.0, 200, prefill_worker="", first_decode_worker="prefill-0")
    assert longest_stage(waiting(), [elsewhere]) == "1.9 s waiting for prefill-0"
    assert "1 longer prompt" in longest_stage(waiting(), [elsewhere, here])


def test_only_computed_tokens_make_a_prompt_longer() -> None:
    usage = {"prompt_tokens": 500, "cached_tokens": 480, "completion_tokens": 8}
    told = longest_stage(waiting(), [computed("a", 0.0, 500, usage=usage)])
    assert told.endswith("which computed 1 other prompt")


def test_a_wait_for_shared_blocks_is_no_wait_for_a_worker() -> None:
    told = longest_stage(waiting(shared_wait_ms=1800.0), [computed("a", 0.0, 200)])
    assert told == (
        "1.9 s waiting for another request, which computed the same beginning of the prompt"
    )


def test_computing_says_how_much_where_and_beside_what() -> None:
    usage = {"prompt_tokens": 1538, "cached_tokens": 128, "completion_tokens": 8}
    mine = request(usage=usage, prefill_worker="", stages_ms={"prefill": 950.0, "queue": 1.0})
    told = "950 ms in prefill on decode-1, which computed 1,410 of 1,538 prompt tokens itself,"
    told += " without a prefill worker"
    assert longest_stage(mine, []) == told
    beside = computed("a", 0.0, 10, prefill_worker="", decode_worker="decode-1")
    assert longest_stage(mine, [mine, beside]) == f"{told}, beside 1 other prompt"


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ("tokenize", "tokenizing the prompt of 100 tokens"),
        ("route", "choosing workers in the router"),
        ("wire", "sending messages between the router and decode-1"),
        ("retry", "at a worker that was lost or refused the request"),
        ("transfer_exposed", "waiting for 6 KV blocks from prefill-0 over nixl"),
        ("first_decode", "computing the second token on decode-1"),
        ("move", "without a token, while the request moved to decode-1"),
    ],
)
def test_each_stage_has_words(stage: str, told: str) -> None:
    assert longest_stage(request(stages_ms={stage: 5.25}), []) == f"5.2 ms {told}"


def test_a_request_without_a_stage_has_no_longest_one() -> None:
    assert longest_stage(request(), []) == ""


def test_a_wait_says_behind_how_many_tokens() -> None:
    mine = waiting(tokens_ahead=9200)
    assert longest_stage(mine, []) == "1.9 s waiting for prefill-0 behind 9,200 prompt tokens"
    assert longest_stage(mine, [computed("a", 0.0, 200)]) == (
        "1.9 s waiting for prefill-0 behind 9,200 prompt tokens, which computed 1 longer prompt"
    )
    mine = request(tokens_ahead=1, stages_ms={"prefill": 950.0})
    told = "950 ms in prefill on prefill-0, which computed 100 prompt tokens, behind 1 token of"
    told += " earlier prompts"
    assert longest_stage(mine, []) == told
    assert (
        longest_stage(mine, [mine, computed("a", 0.0, 10)]) == f"{told} and beside 1 other prompt"
    )


@pytest.mark.parametrize(
    ("worker_queue_ms", "prefill_queue_ms", "told"),
    [
        (1900.0, 1800.0, "for prefill-0"),
        (1900.0, 0.0, "for prefill-0"),  # an older worker does not tell the part
        (1900.0, 3.0, "in the queue of decode-1, before a prefill worker got its prompt"),
        (5.0, 3.0, "in the router, for a turn or for a decode worker that is ready"),
    ],
)
def test_a_wait_names_the_queue(worker_queue_ms: float, prefill_queue_ms: float, told: str) -> None:
    mine = waiting(worker_queue_ms=worker_queue_ms, prefill_queue_ms=prefill_queue_ms)
    assert longest_stage(mine, []) == f"1.9 s waiting {told}"


def test_the_choice_of_the_computing_worker_has_both_predictions() -> None:
    assert prefill_choice(request()) == "", "an older worker tells none"
    predicted = {"local_prefill_ms": 300.0, "remote_prefill_ms": 140.0}
    assert prefill_choice(request(**predicted)) == (
        "prefill-0 computed the prompt: the prediction was 140 ms at prefill-0 with the pull of its"
        " KV, and 300 ms at decode-1 with the delay of its running requests."
    )
    predicted = {"local_prefill_ms": 300.0, "remote_prefill_ms": 900.0}
    assert prefill_choice(request(prefill_worker="", **predicted)) == (
        "decode-1 computed the prompt: the prediction was 300 ms at decode-1 with the delay of its"
        " running requests, and 900 ms at the best prefill worker with the pull of its KV."
    )


def test_stages_before_a_move_name_the_workers_before_it() -> None:
    moved = {"decode_worker": "decode-2", "prefill_worker": "", "moves": 1, "workers_lost": 1}
    told = longest_stage(request(stages_ms={"prefill": 950.0}, **moved), [])
    assert told.startswith("950 ms in prefill on decode-1, which computed 100 prompt tokens itself")
    assert longest_stage(request(stages_ms={"move": 950.0}, **moved), []) == (
        "950 ms without a token, while the request moved from decode-1 to decode-2, because 1"
        " worker was lost"
    )
    moved |= {"moves": 2, "workers_lost": 0}
    assert longest_stage(request(stages_ms={"move": 950.0}, **moved), []) == (
        "950 ms without a token, while the request moved 2 times, from decode-1 to decode-2"
    )
