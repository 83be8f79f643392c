"""Several completions of one prompt: when their jobs begin, where they go, and what they cost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc.aio
import pytest

from tandem.net.rpc.tandem.v1 import inference_pb2
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.router.request.choices.children import child_seed
from tests.harness.scripted_worker import Say, refusal, update
from tests.service.router.conftest import RunningRouter, eventually
from tests.service.router.test_several_prompts import events

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

SEED = 11


def child_of(submit: pb.SubmitSequence) -> int:
    """Returns the number of a child."""
    return int(submit.request_id.partition(".")[2] or 0)


async def count_up(submit: pb.SubmitSequence, say: Say) -> None:
    """Child i says 1000 + i until `max_tokens`; its KV is committed with its first token."""
    token_id = 1000 + child_of(submit)
    for number in range(submit.input.max_tokens):
        last = number + 1 == submit.input.max_tokens
        say(
            update(
                submit,
                [token_id],
                "length" if last else "",
                is_committed=number == 0,
                cached_tokens=16 if child_of(submit) else 0,
            )
        )
        await asyncio.sleep(0)


async def post(router: RunningRouter, **fields: Any) -> Any:
    body = {"prompt": [5] * 40, "max_tokens": 3, "seed": SEED, "return_token_ids": True, **fields}
    return await router.http.post("/v1/completions", json=body)


def worker_of(router: RunningRouter, submit: Any) -> str:
    return next(w.worker_id for w in router.workers if submit in w.submitted)


async def test_children_begin_where_the_first_is_committed(router: RunningRouter) -> None:
    committed, ending = asyncio.Event(), asyncio.Event()

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        if child_of(submit):
            await count_up(submit, say)
            return
        say(update(submit, [1000]))
        await committed.wait()
        say(update(submit, [], is_committed=True))
        await ending.wait()
        say(update(submit, [1000, 1000], "length"))

    router.script(script)
    asked = asyncio.create_task(post(router, n=4))
    await eventually(lambda: len(router.submitted) == 1)
    await asyncio.sleep(0.1)  # no other comes before
    assert len(router.submitted) == 1
    committed.set()
    await eventually(lambda: len(router.submitted) == 4)
    ending.set()
    answer = (await asked).json()
    first, *others = sorted(router.submitted, key=child_of)
    assert {worker_of(router, s) for s in others} == {worker_of(router, first)}
    assert [s.fork_of for s in (first, *others)] == ["", *[first.request_id] * 3]
    assert [s.input.sampling.seed for s in sorted(router.submitted, key=child_of)] == [
        SEED,
        *(child_seed(SEED, child) for child in (1, 2, 3)),
    ]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["token_ids"] for c in answer["choices"]] == [[1000 + i] * 3 for i in range(4)]
    assert all(c["prompt_token_ids"] == [5] * 40 for c in answer["choices"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 12)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("way", ["ended", "second token", "stop string"])
async def test_children_begin_when_the_first_tells_nothing(router: RunningRouter, way: str) -> None:
    """It ended, or it is of a worker that is older than the sign."""
    text = router.tokenizer.decode([1000])

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        if child_of(submit):
            await count_up(submit, say)
        elif way == "ended":
            say(update(submit, [1000], "stop"))
        else:
            say(update(submit, [1000]))
            say(update(submit, [1000]))

    router.script(script)
    stops = {"stop": text} if way != "ended" else {}
    answer = await post(router, n=2, **stops)
    assert answer.status_code == 200, answer.text
    first, other = sorted(router.submitted, key=child_of)
    assert (first.fork_of, other.fork_of) == ("", first.request_id)
    assert len({worker_of(router, s) for s in router.submitted}) == 1


async def test_a_child_that_is_refused_goes_elsewhere(router: RunningRouter) -> None:
    refusals = []

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        if child_of(submit) and not refusals:
            refusals.append(submit)
            say(refusal(submit, "queue_full", 0.01))
        else:
            await count_up(submit, say)

    router.script(script)
    answer = await post(router, n=2)
    assert [c["token_ids"] for c in answer.json()["choices"]] == [[1000] * 3, [1001] * 3]
    first, refused, again = sorted(router.submitted, key=lambda s: (child_of(s), s.attempt))
    assert worker_of(router, first) == worker_of(router, refused) != worker_of(router, again)
    assert again.fork_of == ""


async def test_an_error_of_one_ends_all(router: RunningRouter) -> None:
    before = router.outcomes()

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        say(update(submit, [1000], is_committed=True))
        if child_of(submit) == 2:
            say(refusal(submit, "internal_error"))

    router.script(script)
    answer = await post(router, n=3)
    assert answer.status_code == 500
    ids = sorted(s.request_id for s in router.submitted if child_of(s) != 2)
    await eventually(lambda: sorted(router.cancelled) == ids)
    assert router.outcomes()["internal_error"] == before.get("internal_error", 0) + 1


async def test_a_client_that_leaves_cancels_all(router: RunningRouter) -> None:
    before = router.outcomes()

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        say(update(submit, [1000], is_committed=True))

    router.script(script)
    body = {"prompt": "x", "n": 3, "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as answer:
        seen = set()
        async for line in answer.aiter_lines():
            if line:
                seen.add(json.loads(line.removeprefix("data: "))["choices"][0]["index"])
            if seen == {0, 1, 2}:
                break
    await eventually(lambda: len(router.cancelled) == 3)
    await eventually(
        lambda: router.outcomes().get("cancelled", 0) == before.get("cancelled", 0) + 1
    )


async def test_a_stream_has_chunks_by_index_and_one_usage(router: RunningRouter) -> None:
    router.script(count_up)
    answer = await post(router, n=3, stream=True, stream_options={"include_usage": True})
    *chunks, last = events(answer.text)
    made: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        made.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert made == {i: [1000 + i] * 3 for i in range(3)}
    assert sum(bool(c["choices"][0]["finish_reason"]) for c in chunks) == 3
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (40, 9)


async def test_one_request_is_counted_and_kept(router: RunningRouter) -> None:
    router.script(count_up)
    before = router.outcomes()
    answer = await post(router, n=3)
    assert router.outcomes()["length"] == before.get("length", 0) + 1
    record = (await router.http.get(f"/v1/requests/{answer.json()['id']}")).json()
    assert record["usage"] == {"prompt_tokens": 40, "completion_tokens": 9, "cached_tokens": 0}


async def test_choices_of_a_prompt_follow_each_other(router: RunningRouter) -> None:
    router.script(count_up)
    answer = (await post(router, prompt=[[5, 6], [7]], n=2, echo=True, logprobs=None)).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [[5, 6], [5, 6], [7], [7]]
    assert [c["token_ids"][0] for c in answer["choices"]] == [1000, 1001] * 2
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 12)


async def test_log_probabilities_of_the_prompt_are_computed_once(router: RunningRouter) -> None:
    def measured(logprob: float) -> pb.LogprobEntry:
        return pb.LogprobEntry(logprob=logprob, rank=1, top_ids=[5], top_logprobs=[logprob])

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        asks = submit.input.HasField("prompt_logprobs")
        prompt = [measured(-0.5)] if asks else []
        say(
            update(
                submit,
                [1000],
                "length",
                is_committed=True,
                logprobs=[measured(-1.0)],
                prompt_logprobs=prompt,
            )
        )

    router.script(script)
    answer = await post(router, prompt=[5, 6], n=3, max_tokens=1, echo=True, logprobs=1)
    assert sum(s.input.HasField("prompt_logprobs") for s in router.submitted) == 1
    for choice in answer.json()["choices"]:
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -1.0]


@pytest.mark.parametrize("shows", [False, True])
async def test_best_of_gives_the_highest_mean_log_probability(
    router: RunningRouter, shows: bool
) -> None:
    means = [-2.0, -0.5, -3.0, -1.0]

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        child = child_of(submit)
        num_tokens = 1 + child  # the sum of child 3 is the lowest but one
        for number in range(num_tokens):
            entry = pb.LogprobEntry(logprob=means[child], rank=1)
            reason = "stop" if number + 1 == num_tokens else ""
            say(update(submit, [1000 + child], reason, is_committed=True, logprobs=[entry]))

    router.script(script)
    asked = {"logprobs": 0} if shows else {}
    answer = (await post(router, n=2, best_of=4, max_tokens=9, **asked)).json()
    assert [(c["index"], c["token_ids"]) for c in answer["choices"]] == [
        (0, [1001] * 2),
        (1, [1003] * 4),
    ]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (40, 10)
    for choice, mean in zip(answer["choices"], (-0.5, -1.0), strict=True):
        shown = choice["logprobs"] and choice["logprobs"]["token_logprobs"]
        assert shown == ([mean] * len(choice["token_ids"]) if shows else None)


async def test_over_grpc(router: RunningRouter) -> None:
    router.script(count_up)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        stub = InferenceStub(channel)
        prompt = inference_pb2.TokenIds(ids=[5] * 40)
        request = inference_pb2.GenerateRequest(token_ids=prompt, max_tokens=3, n=3)
        messages = [m async for m in stub.Generate(request, timeout=20)]
        made: dict[int, list[int]] = {}
        for message in messages:
            made.setdefault(message.index, []).extend(message.token_ids)
        assert made == {i: [1000 + i] * 3 for i in range(3)}
        # A slow reader gets several tokens of a choice in one message.
        *before, last = messages
        assert last.HasField("usage")
        assert not any(message.HasField("usage") for message in before)
        usage = messages[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (40, 9)
        beams = {"use_beam_search": True}
        refused: list[tuple[dict[str, Any], str]] = [
            ({"n": 0}, "n must be an integer from 1 to 128"),
            ({"n": 3, "best_of": 2}, "best_of must be an integer from n"),
            ({"length_penalty": 2.0}, "length_penalty must be"),
            ({**beams, "n": 17}, "to 16 with use_beam_search"),
            ({**beams, "stop_token_ids": [3]}, "stop_token_ids cannot be used with use_beam"),
        ]
        num_submitted = len(router.submitted)
        for fields, says in refused:
            request = inference_pb2.GenerateRequest(text="x", **fields)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                [m async for m in stub.Generate(request, timeout=20)]
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert says in (raised.value.details() or "")
        assert len(router.submitted) == num_submitted


async def test_children_whose_worker_is_lost_go_on_with_their_tokens(router: RunningRouter) -> None:
    begun: list[str] = []

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        made = list(submit.input.token_ids[submit.input.num_prompt_tokens :])
        token_id = 1000 + child_of(submit)
        if submit.attempt:
            assert made == [token_id]
            say(update(submit, [token_id] * 2, "length"))
            return
        say(update(submit, [token_id], is_committed=True))
        begun.append(submit.request_id)

    router.script(script)
    asked = asyncio.create_task(post(router, n=3))
    await eventually(lambda: len(begun) == 3)
    (lost,) = [worker for worker in router.workers if worker.submitted]
    lost.break_streams()
    answer = (await asked).json()
    assert [c["token_ids"] for c in answer["choices"]] == [[1000 + i] * 3 for i in range(3)]
    record = (await router.http.get(f"/v1/requests/{answer['id']}")).json()
    assert (record["moves"], record["workers_lost"]) == (3, 3)


async def test_beams_are_jobs_of_one_token_near_each_other(router: RunningRouter) -> None:
    """The second token is as likely as the first, so that all beams come of both."""
    lost = False

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        nonlocal lost
        num_made = len(submit.input.token_ids) - submit.input.num_prompt_tokens
        if num_made == 1 and not lost:  # one beam's worker is lost: it is asked for again
            lost = True
            say(refusal(submit, "worker_lost"))
            return
        top = pb.LogprobEntry(
            logprob=-1.0,
            rank=1,
            top_ids=[1000, 1001, 1002, 1003],
            top_logprobs=[-1.0, -1.5, -3.0, -9.0],
        )
        say(update(submit, [1000], "length", is_committed=True, logprobs=[top]))

    router.script(script)
    answer = await post(router, n=2, use_beam_search=True, temperature=2.0, max_tokens=3)
    assert answer.status_code == 200, answer.text
    assert [c["token_ids"] for c in answer.json()["choices"]] == [
        [1000, 1000, 1000],
        [1000, 1000, 1001],
    ]
    assert all(s.input.sampling.logprobs == 4 for s in router.submitted)
    assert all(s.input.sampling.temperature == 0 for s in router.submitted)
    assert len(router.submitted) == 1 + 2 + 2 + 1
    assert answer.json()["usage"]["completion_tokens"] == 6


async def test_openai_python(router: RunningRouter) -> None:
    router.script(count_up)
    message = {"role": "user", "content": "Hello!"}
    chat = await router.openai.chat.completions.create(
        model="tiny",
        messages=[message],  # type: ignore[list-item]
        n=3,
        max_tokens=2,
    )
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    expected = [router.tokenizer.decode([1000 + i] * 2) for i in range(3)]
    assert [choice.message.content for choice in chat.choices] == expected
    best = await router.openai.completions.create(
        model="tiny", prompt="x", n=2, best_of=2, max_tokens=2
    )
    assert [choice.text for choice in best.choices] == expected[:2]
    texts: dict[int, str] = {}
    stream = await router.openai.chat.completions.create(
        model="tiny",
        messages=[message],  # type: ignore[list-item]
        n=3,
        max_tokens=2,
        stream=True,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert [texts[i] for i in range(3)] == expected
