"""Workers that are lost or leave in mid-stream: the client's stream goes on at the next token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.router.request.dispatcher import FINISH_TOKENS
from tests.harness.scripted_worker import Say, Script, ScriptedWorker, refusing, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

TEXT = "one two three four five six seven eight nine ten eleven twelve"
PROMPT = " prompt" * 40  # two full blocks and a part of a third
NUM_TOKENS = 40


def answer(router: RunningRouter) -> list[int]:
    ids = router.tokenizer.encode(TEXT)
    return (ids * 4)[:NUM_TOKENS]


def going_on(
    ids: list[int],
    upto: int = NUM_TOKENS,
    *,
    cached_tokens: int = 0,
    timings: pb.SequenceTimings | None = None,
) -> Script:
    """Says the answer's tokens after those that came along, up to a place where it falls silent.
    The first and the last token have the timings."""

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        begun = len(submit.input.token_ids) - submit.input.num_prompt_tokens
        for place in range(begun, upto):
            last = "length" if place + 1 == NUM_TOKENS else ""
            cached = cached_tokens if place == begun else 0
            more = {} if timings is None or (place > begun and not last) else {"timings": timings}
            say(update(submit, [ids[place]], last, cached_tokens=cached, **more))
            await asyncio.sleep(0)

    return script


class Reading:
    """One streamed completion, read as it comes."""

    def __init__(self, router: RunningRouter, **fields: Any) -> None:
        self.events: list[Any] = []
        self._router = router
        self._extra = fields.pop("extra_body", {})
        self._fields = fields
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        fields = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "seed": 7, **self._fields}
        stream = await self._router.openai.completions.create(
            model="tiny",
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True, **self._extra},
            **fields,
        )
        async for event in stream:
            self.events.append(event)

    @property
    def token_ids(self) -> list[int]:
        return [t for e in self.events for c in e.choices for t in c.token_ids or ()]

    @property
    def text(self) -> str:
        return "".join(c.text for e in self.events for c in e.choices)

    async def has(self, num_tokens: int) -> None:
        await eventually(lambda: len(self.token_ids) >= num_tokens or self.task.done())

    @property
    def usage(self) -> tuple[int, int, int]:
        usage = self.events[-1].usage
        return (
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens_details.cached_tokens,
        )


@pytest.fixture
async def migrations(router: RunningRouter) -> AsyncIterator[Any]:
    """Returns a function that counts the migrations since the test began, by reason."""
    counter = router.router.generator.metrics.migrations

    def counts() -> dict[str, float]:
        return {r: counter.labels(reason=r)._value.get() for r in ("crash", "drain")}

    before = counts()
    yield lambda: {r: n - before[r] for r, n in counts().items()}
    for worker in router.workers:
        if worker.draining:
            worker.leave()


def split(router: RunningRouter) -> tuple[ScriptedWorker, ScriptedWorker]:
    """The worker that has the request, and the other."""
    first = next(w for w in router.workers if w.submitted)
    return first, next(w for w in router.workers if w is not first)


async def test_a_stream_goes_on_where_its_worker_was_lost(
    router: RunningRouter, migrations: Any
) -> None:
    ids = answer(router)
    router.script(going_on(ids, 5, cached_tokens=0))
    reading = Reading(router)
    await reading.has(5)
    first, second = split(router)
    second.script = going_on(ids, cached_tokens=32)
    first.break_streams()
    await reading.task
    assert reading.token_ids == ids
    num_prompt = len(router.tokenizer.encode(PROMPT))
    assert reading.usage == (num_prompt, NUM_TOKENS, 0), "what was cached for its first token"
    assert [e.choices[0].finish_reason for e in reading.events[:-1]][-1] == "length"
    before, after = first.submitted[0], second.submitted[0]
    assert list(after.input.token_ids) == [*before.input.token_ids, *ids[:5]]
    assert (before.attempt, after.attempt) == (0, 1)
    assert (before.losses_max, after.losses_max) == (3, 2)
    for name in ("num_prompt_tokens", "sampling", "max_tokens", "stop_token_ids", "cache_salt"):
        assert getattr(after.input, name) == getattr(before.input, name), name
    assert migrations() == {"crash": 1, "drain": 0}


@pytest.mark.parametrize("is_old", [False, True], ids=["timings", "no timings"])
async def test_the_record_of_a_stream_that_moved_tells_of_its_first_token(
    router: RunningRouter, migrations: Any, is_old: bool
) -> None:
    ids = answer(router)
    of_first = pb.SequenceTimings(queue_ms=90, prefill_worker_id="prefill-0", tokens_ahead=700)
    router.script(going_on(ids, 5, timings=None if is_old else of_first))
    reading = Reading(router)
    await reading.has(5)
    first, second = split(router)
    second.script = going_on(ids, timings=pb.SequenceTimings(prefill_worker_id="prefill-1"))
    first.break_streams()
    await reading.task
    request_id = reading.events[0].id
    record = (await router.http.get(f"/v1/requests/{request_id}")).json()
    assert (record["first_decode_worker"], record["decode_worker"]) == (
        first.worker_id,
        second.worker_id,
    )
    told = (record["prefill_worker"], record["worker_queue_ms"], record["tokens_ahead"])
    assert told == (("", 0, 0) if is_old else ("prefill-0", 90, 700))


async def test_stop_strings_are_found_across_a_move(router: RunningRouter, migrations: Any) -> None:
    ids = answer(router)
    three = len(router.tokenizer.encode("one two three"))
    router.script(going_on(ids, three))
    reading = Reading(router, stop=["three four"])
    await eventually(lambda: bool(router.submitted))
    await reading.has(1)
    await asyncio.sleep(0.05)  # what may begin a stop string is held back: no event tells of it
    first, second = split(router)
    second.script = going_on(ids)
    first.break_streams()
    await reading.task
    assert reading.text == "one two "
    assert reading.events[-2].choices[0].finish_reason == "stop"
    assert migrations()["crash"] == 1


async def test_a_request_that_kills_its_workers_costs_three(
    router: RunningRouter, migrations: Any
) -> None:
    ids = answer(router)

    for worker in router.workers:

        async def deadly(
            submit: pb.SubmitSequence, say: Say, worker: ScriptedWorker = worker
        ) -> None:
            begun = len(submit.input.token_ids) - submit.input.num_prompt_tokens
            say(update(submit, [ids[begun]]))
            worker.break_streams()

        worker.script = deadly
    reading = Reading(router)
    with pytest.raises(openai.APIError, match="3 workers were lost") as raised:
        await reading.task
    assert raised.value.code == "worker_lost"
    assert len(router.submitted) == 3
    assert reading.token_ids == ids[:3]
    kept = (await router.http.get(f"/v1/requests/{router.submitted[0].request_id}")).json()
    assert (kept["outcome"], kept["moves"], kept["workers_lost"]) == ("worker_lost", 2, 3)
    assert migrations()["crash"] == 2


async def test_prefill_workers_that_were_lost_count(router: RunningRouter, migrations: Any) -> None:
    async def deadly(submit: pb.SubmitSequence, say: Say) -> None:
        for lost in range(1, min(2, submit.losses_max) + 1):
            say(update(submit, [], workers_lost=lost))
        if submit.losses_max == 1:
            error = pb.WorkerError(code="worker_lost", message="the last one")
            say(update(submit, [], "error", error=error))
            return
        for worker in router.workers:
            worker.break_streams()

    router.script(deadly)
    reply = await router.http.post("/v1/completions", json={"prompt": "x"})
    assert reply.json()["error"]["code"] == "worker_lost"
    assert "3 workers were lost" in reply.json()["error"]["message"]
    assert [s.losses_max for s in router.submitted] == [3]
    assert migrations()["crash"] == 0


async def test_one_that_moves_waits_while_all_are_full(
    router: RunningRouter, migrations: Any
) -> None:
    ids = answer(router)
    router.script(going_on(ids, 4))
    reading = Reading(router)
    await reading.has(4)
    first, _ = split(router)
    router.script(refusing("queue_full", retry_after_s=0.1))
    first.break_streams()
    await eventually(lambda: len(router.submitted) >= 4)
    router.script(going_on(ids))
    await reading.task
    assert reading.token_ids == ids
    assert migrations()["crash"] == 1


async def test_a_stream_ends_clearly_when_nobody_takes_it(router: RunningRouter) -> None:
    ids = answer(router)
    router.script(going_on(ids, 4))
    reading = Reading(router)
    await reading.has(4)
    router.script(refusing("queue_full", retry_after_s=0.1))
    split(router)[0].break_streams()
    with pytest.raises(
        openai.APIError, match="1 worker was lost while this request ran, after 4"
    ) as e:
        await reading.task
    assert e.value.code == "worker_lost"


async def test_a_worker_that_leaves_hands_over(router: RunningRouter, migrations: Any) -> None:
    ids = answer(router)
    router.script(going_on(ids, 6))
    reading = Reading(router)
    await reading.has(6)
    first, second = split(router)
    may_begin = asyncio.Event()

    async def when_told(submit: pb.SubmitSequence, say: Say) -> None:
        await may_begin.wait()
        await going_on(ids)(submit, say)

    second.script = when_told
    first.drain()
    await eventually(lambda: bool(second.submitted))
    await asyncio.sleep(0.05)
    assert not first.cancelled, "it is the holder of the blocks until the other has a token"
    may_begin.set()
    await reading.task
    await eventually(lambda: bool(first.cancelled))
    assert reading.token_ids == ids
    submit = second.submitted[0]
    assert len(submit.input.token_ids) == submit.input.num_prompt_tokens + 6
    num_blocks = len(submit.input.token_ids) // 16
    assert [(h.worker_id, h.num_blocks) for h in submit.prefix_holders] == [
        (first.worker_id, num_blocks)
    ]
    assert submit.prefix_holders[0].address == first.address
    assert migrations() == {"crash": 0, "drain": 1}


async def test_one_that_stays_loses_nothing(router: RunningRouter, migrations: Any) -> None:
    """Nobody takes it, or it ends sooner than it is taken over: all that was made counts."""
    ids = answer(router)
    for other in (refusing("queue_full"), refusing("kv_capacity_exceeded"), going_on(ids, 0)):
        may_go_on = asyncio.Event()

        async def in_two_parts(
            submit: pb.SubmitSequence, say: Say, until: asyncio.Event = may_go_on
        ) -> None:
            await going_on(ids, 6)(submit, say)
            await until.wait()
            for place in range(6, NUM_TOKENS):
                last = "length" if place + 1 == NUM_TOKENS else ""
                say(update(submit, [ids[place]], last))

        router.script(in_two_parts)
        for worker in router.workers:
            worker.submitted.clear()
        reading = Reading(router)
        await reading.has(6)
        first, second = split(router)
        second.script = other
        first.drain()
        await eventually(lambda w=second: bool(w.submitted))
        await asyncio.sleep(0.05)
        may_go_on.set()
        await reading.task
        assert reading.token_ids == ids
        assert migrations() == {"crash": 0, "drain": 0}
        first.leave()
        await eventually(lambda w=first: w.has_stream and _is_usable(router, w))


async def test_short_rests_are_finished_where_they_are(
    router: RunningRouter, migrations: Any
) -> None:
    ids = answer(router)
    may_end = asyncio.Event()

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        say(update(submit, ids[:10]))
        await may_end.wait()
        say(update(submit, ids[10:], "length"))

    router.script(script)
    assert NUM_TOKENS - 10 <= FINISH_TOKENS
    reading = Reading(router)
    await reading.has(10)
    first, second = split(router)
    first.drain()
    await asyncio.sleep(0.05)
    may_end.set()
    await reading.task
    assert reading.token_ids == ids
    assert not second.submitted
    assert migrations() == {"crash": 0, "drain": 0}


async def test_one_that_left_at_its_deadline_is_no_crash(
    router: RunningRouter, migrations: Any
) -> None:
    ids = answer(router)
    router.script(going_on(ids, 10))
    reading = Reading(router)
    await reading.has(10)
    first, second = split(router)
    first.drain()
    second.script = going_on(ids)
    await asyncio.sleep(0.05)
    assert not second.submitted
    first.leave()
    await reading.task
    assert reading.token_ids == ids
    assert second.submitted[0].losses_max == 3
    assert not second.submitted[0].prefix_holders
    assert migrations() == {"crash": 0, "drain": 1}


async def test_one_that_stays_after_all_is_not_sent_twice_on_one_stream(
    router: RunningRouter, migrations: Any
) -> None:
    """Its worker was told to leave, and then not to; meanwhile another one refused."""
    ids = answer(router)
    may_answer, may_refuse = asyncio.Event(), asyncio.Event()

    async def in_two_parts(submit: pb.SubmitSequence, say: Say) -> None:
        await going_on(ids, 6)(submit, say)
        await may_answer.wait()
        say(update(submit, ids[6:], "length"))

    async def refuses_late(submit: pb.SubmitSequence, say: Say) -> None:
        await may_refuse.wait()
        await refusing("queue_full")(submit, say)

    router.script(in_two_parts)
    reading = Reading(router)
    await reading.has(6)
    first, second = split(router)
    second.script = refuses_late
    first.drain()
    await eventually(lambda: bool(second.submitted))
    first.stay()
    await eventually(lambda: _is_usable(router, first))
    second.drain()  # so that the first is the only one to be chosen
    await eventually(lambda: not _is_usable(router, second))
    may_refuse.set()
    await asyncio.sleep(0.1)
    may_answer.set()
    await reading.task
    assert reading.token_ids == ids
    assert len(first.submitted) == 1


async def test_another_worker_takes_what_does_not_fit_into_a_smaller_pool(
    router: RunningRouter, migrations: Any
) -> None:
    """Placed at first, and moved off a worker that was lost."""
    ids = answer(router)
    small, large = router.workers
    before = small.load
    small.load = replace(before, blocks_total=500)
    small.tell_load(num_submits=0)
    view = router.router.view
    await eventually(lambda: view.roster().by_id[small.worker_id].load.blocks_total == 500)
    small.script, large.script = refusing("kv_capacity_exceeded"), going_on(ids)
    for _ in range(8):
        reading = Reading(router)
        await reading.task
        assert reading.token_ids == ids
    assert small.submitted, "it was never asked: this shows nothing"

    for worker in router.workers:
        worker.submitted.clear()
    large.script = going_on(ids, 6)
    reading = Reading(router)
    await reading.has(6)
    large.script = going_on(ids)
    large.break_streams()  # and connects again
    await reading.task
    assert reading.token_ids == ids
    assert migrations() == {"crash": 1, "drain": 0}
    small.load = before
    small.tell_load(num_submits=0)


def _is_usable(router: RunningRouter, worker: ScriptedWorker) -> bool:
    return router.router.view.roster().by_id[worker.worker_id].usable
