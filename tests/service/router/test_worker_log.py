"""Logs of workers on other machines, through a router and as `tandem logs` prints them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tandem.cluster.logs.run_logs import Addresses
from tandem.cluster.logs.worker_log import show_names, show_worker_log
from tandem.errors import OperateError
from tandem.net.observability.log_file import FILE_VARIABLE
from tandem.router.workers.rows import Gone
from tests.harness.scripted_worker import ScriptedWorker
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


def path(worker_id: str) -> str:
    return f"/v1/cluster/workers/{worker_id}/log"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine has no runs of `tandem up` but those of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "tandem" / "runs"


@pytest_asyncio.fixture(loop_scope="module")
async def worker(router: RunningRouter, tmp_path: Path) -> AsyncIterator[ScriptedWorker]:
    """A worker whose log is on another machine: no run of this one has it."""
    remote = router.workers[0]
    remote.log = tmp_path / "decode-0.log"
    remote.log.write_text("its first line\nü [not] markup\n")
    yield remote
    remote.log = None


async def cluster_id(router: RunningRouter) -> str:
    return str((await router.admin.get("/v1/cluster")).json()["cluster_id"])


async def test_names_are_those_of_this_machine_and_of_others(
    router: RunningRouter, worker: ScriptedWorker, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = state / f"20260101T000000Z-{await cluster_id(router)}"
    run.mkdir(parents=True)
    (run / "decode-0.log").write_text("")
    (run / "redis.log").write_text("")
    await asyncio.to_thread(show_names, str(router.admin.base_url))
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert {name: where.strip() for name, where in rows.items()} == {
        "decode-0": "this machine",
        "redis": "this machine",
        "decode-1": router.router.view.known()[1].record.host,
    }


async def printed(router: RunningRouter, process_id: str) -> None:
    url = str(router.admin.base_url)
    await asyncio.to_thread(show_worker_log, url, process_id, follow=False)


async def test_a_part_comes_with_the_place_where_it_ends(
    router: RunningRouter, worker: ScriptedWorker
) -> None:
    first = (await router.admin.get(path("decode-0"))).json()
    assert first["text"] == "its first line\nü [not] markup\n"
    assert worker.log is not None
    with worker.log.open("ab") as stream:
        stream.write(b"\xff is no text\n")
    again = {"after": first["after"]}
    second = (await router.admin.get(path("decode-0"), params=again)).json()
    assert second["text"] == "\ufffd is no text\n"
    again = {"after": second["after"]}
    assert (await router.admin.get(path("decode-0"), params=again)).json()["text"] == ""


@pytest.mark.parametrize(
    ("worker_id", "after", "status", "message"),
    [
        ("decode-0", "somewhere", 400, "it must be the `after` of the previous answer"),
        ("decode-1", "", 409, "this worker has no log file"),
        ("decode-7", "", 404, "there are: decode-0, decode-1"),
    ],
)
async def test_what_cannot_be_read_is_said(
    router: RunningRouter,
    worker: ScriptedWorker,
    worker_id: str,
    after: str,
    status: int,
    message: str,
) -> None:
    answer = await router.admin.get(path(worker_id), params={"after": after})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_the_routers_own_log_comes_too(
    router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = path(router.router._pages[""].config.router_id)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    assert (await router.admin.get(own)).status_code == 409
    (tmp_path / "router-0.log").write_text("a router\n")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "router-0.log"))
    assert (await router.admin.get(own)).json()["text"] == "a router\n"


async def test_the_command_prints_what_is_on_another_machine(
    router: RunningRouter,
    worker: ScriptedWorker,
    state: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert worker.log is not None
    await printed(router, "decode-0")
    assert capsys.readouterr().out == worker.log.read_text()
    # A worker of another cluster ran here.
    other = state / "20270101T000000Z-other"
    other.mkdir(parents=True)
    (other / "decode-0.log").write_text("another cluster\n")
    # An earlier worker of this name ran here; what runs now does not write there.
    run = state / f"20260101T000000Z-{await cluster_id(router)}"
    run.mkdir(parents=True)
    (run / "decode-0.log").write_text("an old run\n")
    await printed(router, "decode-0")
    assert capsys.readouterr() == (worker.log.read_text(), "")
    worker.log = None  # as if it had died: the router cannot have it
    await printed(router, "decode-0")
    out, err = capsys.readouterr()
    assert out == "an old run\n"
    assert "this worker has no log file" in err
    assert "this is the last log of decode-0 on this machine" in err


async def test_the_command_follows_over_silence(
    router: RunningRouter,
    worker: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = worker.log
    seen = ""
    assert log is not None

    class Screen:
        def write(self, text: str) -> None:
            nonlocal seen
            seen += text
            if "the end" in seen:
                raise KeyboardInterrupt

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Screen())
    url = str(router.admin.base_url)
    following = asyncio.create_task(
        asyncio.to_thread(show_worker_log, url, "decode-0", follow=True)
    )
    await eventually(lambda: "markup" in seen)
    worker.log = None  # it cannot say now
    err = ""

    def is_told() -> bool:
        nonlocal err
        err += capsys.readouterr().err
        return "New lines follow when it answers again" in err

    await eventually(is_told)
    worker.log = log
    with log.open("a") as stream:
        stream.write("the end\n")
    await following
    assert seen == log.read_text()


async def test_a_worker_that_has_gone_is_told_with_its_host(
    router: RunningRouter, worker: ScriptedWorker, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = router.router.view
    record = view.known()[0].record
    last = msgspec.structs.replace(record, worker_id="decode-9", host="gpu-3")
    view.gone["decode-9"] = Gone(last, time.time(), has_left=False)
    try:
        answer = await router.admin.get(path("decode-9"))
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert "on host gpu-3 (127.0.0.1), where `tandem logs decode-9` prints it" in message
        where = r"decode-9 is lost: .* on its host gpu-3 \(127.0.0.1\): run `tandem logs decode-9`"
        with pytest.raises(OperateError, match=where):
            await printed(router, "decode-9")
        run = state / f"20260101T000000Z-{await cluster_id(router)}"
        run.mkdir(parents=True)
        (run / "decode-9.log").write_text("an old run\n")
        await printed(router, "decode-9")
        out, err = capsys.readouterr()
        assert out == "an old run\n"
        assert "decode-9 last ran on gpu-3 (127.0.0.1); this is its log from an earlier run" in err
    finally:
        del view.gone["decode-9"]


async def test_without_a_router_the_logs_of_this_machine_are_printed(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = "http://127.0.0.1:1"
    with pytest.raises(
        OperateError, match=r"this machine has no log of 'decode-0'.*no router answers"
    ):
        show_worker_log(nobody, "decode-0", follow=False)
    for start, admin in (("2026", nobody), ("2027", "http://127.0.0.1:2")):
        run = state / f"{start}0101T000000Z-c"
        run.mkdir(parents=True)
        (run / "decode-0.log").write_text(f"the run at {admin}\n")
        (run / "addresses.json").write_bytes(msgspec.json.encode(Addresses("", admin)))
    show_worker_log(nobody, "decode-0", follow=False)
    assert capsys.readouterr().out == f"the run at {nobody}\n"
    show_names(nobody)
    assert capsys.readouterr().out.split() == ["log", "where", "decode-0", "this", "machine"]
