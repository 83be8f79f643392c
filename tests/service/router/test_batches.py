"""Files and batches, with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from tandem.common.config.files import FileOptions
from tandem.common.process.cancellation import cancel
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tests.harness.scripted_worker import Say, saying, silent, update
from tests.harness.waiting import eventually
from tests.service.router.conftest import RunningRouter
from tests.service.router.test_http import EOS, ids

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

_FOLDER = tempfile.TemporaryDirectory()
FILE_BYTES_MAX = 1 << 20
ROUTER = {
    "files": FileOptions(
        files_url=_FOLDER.name + "/files",
        file_bytes_max=FILE_BYTES_MAX,
        tenant_bytes_max=4 * FILE_BYTES_MAX,
    ),
    "trust_tenant_header": True,
}
CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def reported(running: RunningRouter) -> AsyncIterator[None]:
    """The workers report that they are idle, as real ones do after each step."""

    async def report() -> None:
        while True:
            for worker in running.workers:
                worker.tell_load(1 << 30)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(report())
    yield
    await cancel(task)


def line(custom_id: str, endpoint: str = CHAT, **body: Any) -> dict[str, Any]:
    body = body or {"messages": [{"role": "user", "content": "Hello"}]}
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}


def as_file(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def upload(router: RunningRouter, data: bytes, **more: Any) -> Any:
    return await router.openai.files.create(file=("in.jsonl", data), purpose="batch", **more)


async def start(router: RunningRouter, data: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    file = await upload(router, data)
    return await router.openai.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def ended(router: RunningRouter, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            batch = await router.openai.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.1)


async def lines_of(router: RunningRouter, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = await router.openai.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines()]


async def test_a_file_comes_back(router: RunningRouter) -> None:
    data = as_file(*(line(f"{n}") for n in range(3))) + b"\r\n--x"
    file = await upload(router, data, expires_after={"anchor": "created_at", "seconds": 3600})
    assert (file.bytes, file.filename, file.purpose) == (len(data), "in.jsonl", "batch")
    assert file.expires_at is not None
    assert 3599 <= file.expires_at - file.created_at <= 3601
    assert (await router.openai.files.content(file.id)).read() == data
    assert (await router.openai.files.retrieve(file.id)).id == file.id
    assert file.id in [each.id async for each in await router.openai.files.list()]
    only = await router.openai.files.list(purpose="batch", limit=1)
    assert only.data[0].id == file.id
    assert (await router.openai.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        await router.openai.files.retrieve(file.id)


async def test_what_an_upload_may_not_be(router: RunningRouter) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose is 'vision'; it must be batch"):
        await router.openai.files.create(file=b"x", purpose="vision")
    with pytest.raises(openai.APIStatusError, match=f"at most {FILE_BYTES_MAX} bytes") as refused:
        await upload(router, b"x" * (FILE_BYTES_MAX + 1))
    assert refused.value.status_code == 413
    big = [await upload(router, b"x" * FILE_BYTES_MAX) for _ in range(3)]
    two = [upload(router, b"x" * FILE_BYTES_MAX) for _ in range(2)]
    ends = await asyncio.gather(*two, return_exceptions=True)
    assert any(isinstance(end, openai.PermissionDeniedError) for end in ends)
    assert all("files may have at most" in str(end) for end in ends if isinstance(end, Exception))
    big += [end for end in ends if not isinstance(end, BaseException)]
    other = await upload(router, b"x", extra_headers={"x-tandem-tenant": "other"})
    assert other.bytes == 1
    for file in big:
        await router.openai.files.delete(file.id)
    url = "/v1/files"
    for form in ({"data": {"purpose": "batch"}}, {"files": {"other": b"x"}}, {"content": b"x"}):
        assert (await router.http.post(url, **form)).status_code == 400  # type: ignore[arg-type]
    # The purpose may follow the file.
    form = {"file": ("f", b"abc"), "purpose": (None, b"batch")}
    assert (await router.http.post(url, files=form)).json()["bytes"] == 3
    form["purpose"] = (None, b"fine-tune")
    before = len((await router.openai.files.list()).data)
    assert (await router.http.post(url, files=form)).status_code == 400
    assert len((await router.openai.files.list()).data) == before


async def test_tenants_do_not_see_each_other(router: RunningRouter) -> None:
    theirs = {"extra_headers": {"x-tandem-tenant": "other"}}
    batch = await start(router, as_file(line("a")))
    mine = await upload(router, b"x")
    for call in (
        router.openai.files.retrieve(mine.id, **theirs),
        router.openai.files.content(mine.id, **theirs),
        router.openai.files.delete(mine.id, **theirs),
        router.openai.batches.retrieve(batch.id, **theirs),
        router.openai.batches.cancel(batch.id, **theirs),
        router.openai.batches.create(
            input_file_id=mine.id, endpoint=CHAT, completion_window="24h", **theirs
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    assert not (await router.openai.batches.list(**theirs)).data
    assert mine.id not in [f.id for f in (await router.openai.files.list(**theirs)).data]
    await router.openai.batches.cancel(batch.id)
    await ended(router, batch.id)


async def test_each_line_has_one_answer(router: RunningRouter) -> None:
    router.script(saying([*ids(router, "Hi!"), EOS], finish_reason="stop"))
    wrong = line("wrong", messages="none")
    other = line("no-model", model="other", messages=[{"role": "user", "content": "x"}])
    good = [line(f"good-{n}") for n in range(20)]
    batch = await start(router, as_file(*good, wrong, other), metadata={"job": "nightly"})
    assert batch.status == "validating"
    assert batch.metadata == {"job": "nightly"}
    batch = await ended(router, batch.id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 22, 20, 2)
    answers = await lines_of(router, batch.output_file_id)
    assert sorted(each["custom_id"] for each in answers) == sorted(g["custom_id"] for g in good)
    for each in answers:
        response = each["response"]
        assert (response["status_code"], each["error"]) == (200, None)
        assert response["body"]["choices"][0]["message"]["content"] == "Hi!"
        assert response["body"]["id"].endswith(response["request_id"])
    errors = {e["custom_id"]: e for e in await lines_of(router, batch.error_file_id)}
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["no-model"]["response"]["status_code"] == 404
    assert errors["no-model"]["response"]["body"]["error"]["code"] == "model_not_found"
    file = await router.openai.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output"
    listed = [each.id async for each in await router.openai.batches.list(limit=1)]
    assert listed[0] == batch.id


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "x"}, "text_completion"),
        ("/v1/responses", {"input": "x"}, "response"),
    ],
)
async def test_other_endpoints(
    router: RunningRouter, endpoint: str, body: dict[str, Any], kind: str
) -> None:
    router.script(saying([*ids(router, "Hi!"), EOS], finish_reason="stop"))
    batch = await start(router, as_file(line("a", endpoint, **body)), endpoint)
    (answer,) = await lines_of(router, (await ended(router, batch.id)).output_file_id)
    assert answer["response"]["body"]["object"] == kind


@pytest.mark.parametrize(
    ("data", "codes"),
    [
        (b"", ["empty_file"]),
        (b"{}\n[]\nx\n", ["missing_required_parameter", "invalid_json_line", "invalid_json_line"]),
        (as_file(line("a"), line("a")), ["duplicate_custom_id"]),
        (as_file(line("a", "/v1/embeddings")), ["invalid_url"]),
        (as_file(line("a", stream=True)), ["invalid_stream"]),
    ],
)
async def test_faulty_files(router: RunningRouter, data: bytes, codes: list[str]) -> None:
    batch = await ended(router, (await start(router, data)).id)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == codes
    assert batch.output_file_id is batch.error_file_id is None
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'failed'"):
        await router.openai.batches.cancel(batch.id)


async def test_cancelling_frees_the_workers(router: RunningRouter) -> None:
    router.script(silent)
    batch = await start(router, as_file(line("a"), line("b")))
    await eventually(lambda: len(router.submitted) >= 2)
    file_id = batch.input_file_id
    with pytest.raises(openai.ConflictError, match=f"is the input of {batch.id}"):
        await router.openai.files.delete(file_id)
    assert (await router.openai.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(router, batch.id)
    assert batch.status == "cancelled"
    assert batch.output_file_id is None
    await eventually(lambda: len(router.cancelled) >= 2)
    assert (await router.openai.files.delete(file_id)).deleted


async def test_wrong_batches(router: RunningRouter) -> None:
    file = await upload(router, as_file(line("a")))
    for wrong in (
        {"endpoint": "/v1/images"},
        {"completion_window": "1y"},
        {"completion_window": "999d"},
        {"metadata": {"x": "y" * 600}},
    ):
        sent = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **wrong}
        answer = await router.http.post("/v1/batches", json=sent)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))
    for file_id in ("file-1", "../x", f"file-{'0' * 32}"):
        with pytest.raises(openai.NotFoundError):
            await router.openai.batches.create(
                input_file_id=file_id, endpoint=CHAT, completion_window="24h"
            )
    with pytest.raises(openai.NotFoundError, match="moderation model"):
        await router.openai.moderations.create(input="x")


async def test_lines_stop_for_an_interactive_request(router: RunningRouter) -> None:
    """They go on where they stopped, and each answer has each token once."""
    words = ids(router, "one two three four five six")
    lengths: dict[str, list[int]] = {}  # line -> tokens that each of its submissions begins with
    interactive: list[str] = []
    has_asked, may_go_on = asyncio.Event(), asyncio.Event()

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        if has_asked.is_set() and submit.request_id not in lengths:
            interactive.append(submit.request_id)
            say(update(submit, words[:1]))
            await may_go_on.wait()
            say(update(submit, [EOS], "stop"))
            return
        known = lengths.setdefault(submit.request_id, [])
        known.append(len(submit.input.token_ids))
        sent = known[-1] - known[0]
        if not sent:
            say(update(submit, words[:1]))
            await has_asked.wait()
            await eventually(lambda: bool(interactive))
            say(update(submit, words[1:2]))
            sent = 2
            await asyncio.sleep(0.3)  # a line that stops is cancelled meanwhile
        say(update(submit, [*words[sent:], EOS], "stop"))

    router.script(script)

    def tell_running(num_running: int) -> None:
        for worker in router.workers:
            worker.load = msgspec.structs.replace(
                worker.load, num_running=num_running, num_lines=1, num_running_slots=8
            )
            worker.tell_load(1 << 30)

    body = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 40}
    batch = await start(router, as_file(*(line(name, **body) for name in "ab")))
    counts = router.router.generator.lines
    await eventually(lambda: (counts.num_running, counts.num_waiting) == (2, 0))
    asked = asyncio.create_task(router.http.post(CHAT, json={**body, "max_tokens": 7}))
    tell_running(7)  # more than the six slots that lines may fill
    has_asked.set()
    await eventually(lambda: len(router.cancelled) == 2)
    assert all(len(known) == 1 for known in lengths.values())
    may_go_on.set()
    tell_running(1)
    assert (await asked).status_code == 200
    batch = await ended(router, batch.id)
    answers = await lines_of(router, batch.output_file_id)
    assert len(answers) == 2
    for answer in answers:
        choice = answer["response"]["body"]["choices"][0]
        assert choice["message"]["content"] == "one two three four five six"
        assert answer["response"]["body"]["usage"]["completion_tokens"] == len(words) + 1
    assert [len(known) for known in lengths.values()] == [2, 2]
