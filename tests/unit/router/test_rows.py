"""Rows of workers that are known, and the sentence that says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tandem.common.worker_load import TierUse
from tandem.net.store.registry import KvCompatibility, LoadingNotice, WorkerRecord
from tandem.router.workers.loading import LoadingNow, LoadingWorkers
from tandem.router.workers.rows import (
    Gone,
    Seen,
    WorkerRow,
    effect_of,
    headline,
    problems_of,
    remedy_of,
    worker_rows,
)
from tandem.router.workers.troubles import clock_of_router

NOW = 1000.0


def record(worker_id: str = "decode-0", state: Any = "ready") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        epoch="e",
        role=worker_id.partition("-")[0],
        state=state,
        address="10.0.0.1:5000",
        metrics_address="",
        host="h",
        pid=1,
        model="m",
        max_model_len=100,
        compatibility=KvCompatibility("m", "float32", "invariant", 16, "float32", "l", 1),
    )


def agent(state: str, **more: Any) -> dict[str, Any]:
    return {"decode": {"agents": [{"id": "decode-0", "state": state, "starts": 3, **more}]}}


def rows(
    *seen: Seen, gone: tuple[Gone, ...] = (), pools: dict[str, Any] | None = None
) -> list[WorkerRow]:
    lost = {g.record.worker_id: g for g in gone}
    return worker_rows(seen, lost, pools or {}, NOW)


def sentence(
    found: list[WorkerRow], pools: dict[str, Any], *, reason: str = "", redis: str = "ok"
) -> str:
    return headline(problems_of(found, pools, reason=reason, redis=redis), pools)


@pytest.mark.parametrize(
    ("seen", "state", "note"),
    [
        (Seen(record()), "ready", ""),
        (Seen(record(), silent_s=12.3), "silent", "it has not reported for 12 s"),
        (
            Seen(record(), stuck_s=9),
            "hung",
            "its engine has work, but has computed no step for 9 s",
        ),
        (Seen(record(), is_compatible=False), "incompatible", "it serves another model"),
        (
            Seen(record(), is_connected=False),
            "not connected",
            "this router cannot reach it at 10.0.0.1:5000",
        ),
        (
            Seen(record(state="draining"), is_connected=False, num_left=(1, 2)),
            "draining",
            "1 sequence and 2 leases are left",
        ),
    ],
)
def test_a_record_tells_what_its_worker_does(seen: Seen, state: str, note: str) -> None:
    (row,) = rows(seen)
    assert (row.worker_id, row.pool, row.state) == ("decode-0", "decode", state)
    assert note in row.note


def test_an_agent_tells_why_there_is_no_record() -> None:
    line = "MemoryError: no room"
    (row,) = rows(pools=agent("restarting", last_line=line))
    assert row.state == "restarting"
    assert row.note == (
        f"its process ended after it had logged: {line}; it has been restarted 3 times already"
    )
    (row,) = rows(Seen(record()), pools=agent("restarting"))
    assert row.state == "restarting", "the record of the process that ended has not expired yet"
    (row,) = rows(pools=agent("running", since=NOW - 7))
    assert (row.state, row.note) == ("loading", "started 7 s ago")
    (row,) = rows(pools=agent("draining"))
    assert (row.state, row.note) == ("draining", "its process ends")


def test_a_worker_that_is_gone_keeps_its_row() -> None:
    gone = (
        Gone(record("decode-0"), NOW - 30, has_left=False),
        Gone(record("prefill-1"), NOW - 30, has_left=True),
    )
    lost, stopped = rows(gone=gone)
    assert (lost.state, stopped.state) == ("lost", "stopped")
    assert "30 s ago; it was at 10.0.0.1:5000" in lost.note
    (row,) = rows(gone=gone[:1], pools=agent("running", pid=2, since=NOW - 40))
    assert row.state == "loading", "another process has been started"
    (row,) = rows(gone=gone[:1], pools=agent("running", pid=1, is_stopped=True))
    assert (row.state, row.note.partition(",")[0]) == (
        "silent",
        "its process 1 is stopped (SIGSTOP)",
    )
    left = Gone(record("decode-0"), NOW - 1, has_left=True)
    (row,) = rows(gone=(left,), pools=agent("running", pid=1))
    assert (row.state, row.note) == ("draining", "its process ends")
    (row,) = rows(gone=(left,), pools=agent("running", pid=2))
    assert row.state == "loading", "another process has been started"


def test_a_worker_that_loads_tells_how_far_it_is() -> None:
    told = {
        "decode-0": LoadingNow(LoadingNotice("decode", 3_000_000_000, 4_000_000_000, 7)),
        "prefill-9": LoadingNow(LoadingNotice("prefill")),
    }
    found = worker_rows([], {}, {}, NOW, told)
    assert [(row.worker_id, row.pool, row.state) for row in found] == [
        ("decode-0", "decode", "loading"),
        ("prefill-9", "prefill", "loading"),
    ]
    assert found[0].note == "75% of its weights (4 GB)"
    assert found[1].note == "0% of its weights"
    pools = agent("running", since=NOW - 8)
    (row, _) = worker_rows([], {}, pools, NOW, told)
    assert row.note == "75% of its weights (4 GB); started 8 s ago"
    (row, _) = worker_rows([Seen(record())], {}, {}, NOW, told)
    assert row.state == "ready", "its record knows more"
    (row, _) = worker_rows([], {}, agent("restarting", last_line="no memory"), NOW, told)
    assert row.state == "restarting", "the notice is of the process before"


def test_a_worker_that_loads_for_ever_or_failed_says_so() -> None:
    stalled = LoadingNow(LoadingNotice("decode", 1_000_000_000, 4_000_000_000, 9), stalled_s=9.0)
    failed = LoadingNow(LoadingNotice("decode", failed="its model is another one"), 3.0, 30.0)
    dead = LoadingNow(LoadingNotice("decode"), 12.0, 12.0)
    found = worker_rows([], {}, {}, NOW, {"a": stalled, "b": failed, "c": dead})
    assert [row.state for row in found] == ["loading", "failed", "silent"]
    assert [row.problem for row in found] == ["loading", "failed", "silent"]
    assert found[0].note == "25% of its weights (4 GB), no progress for 9 s"
    assert found[1].note == "its model is another one"
    assert found[2].note.endswith("has not reported for 12 s")
    stalled = LoadingNow(LoadingNotice("decode", num_bytes_all=1), stalled_s=31.0)
    (row,) = worker_rows([], {}, {}, NOW, {"a": stalled})
    assert (row.state, row.problem) == ("loading", "stalled")


def test_a_process_that_is_loaded_again_says_how_the_one_before_ended() -> None:
    ended = {"exit": "ended by SIGKILL", "last_line": "the last word"}
    (row,) = rows(pools=agent("running", since=NOW - 2, **ended))
    assert (row.state, row.note) == (
        "loading",
        "started 2 s ago; its previous process was ended by SIGKILL after it had logged: the last "
        "word",
    )
    (row,) = rows(pools=agent("lost", host="10.0.0.7"))
    assert (row.state, row.note) == ("lost", "its host 10.0.0.7 is down or cut off")


def test_a_record_of_the_process_before_says_nothing_of_the_one_that_loads() -> None:
    ended = {"exit": "ended by SIGKILL", "last_line": ""}
    pools = agent("running", pid=2, since=NOW - 1, **ended)
    (row,) = rows(Seen(record(), silent_s=3.4), pools=pools)
    assert (row.state, row.problem) == ("loading", "loading")
    assert row.note == "started 1 s ago; its previous process was ended by SIGKILL"

    (row,) = rows(Seen(record(), silent_s=3.4), pools=agent("running", pid=1))
    assert row.note == "it has not reported for 3 s, but its process 1 runs"


def test_a_worker_that_was_killed_is_described_by_its_new_process_at_once() -> None:
    before = with_("decode-0", started_at=NOW - 100)
    pools = agent("running", pid=2, since=NOW - 0.5, exit="ended by SIGKILL", last_line="")
    (row,) = rows(Seen(before), pools=pools)
    assert (row.state, row.note) == (
        "loading",
        "started 0 s ago; its previous process was ended by SIGKILL",
    )
    gone = Gone(before, NOW - 0.1, has_left=False)  # the old record expires after the restart
    (row,) = rows(gone=(gone,), pools=pools)
    assert row.state == "loading"
    newer = with_("decode-0", started_at=NOW - 0.1, pid=3)
    (row,) = rows(Seen(newer), pools=pools)
    assert row.state == "ready", "the agent's report is older than the record"


def test_the_headline_names_cause_effect_and_remedy() -> None:
    pools = agent("running", pid=2, since=NOW - 2, exit="ended by SIGKILL", last_line="")
    pools["decode"] |= {"ready": 1}
    found = rows(Seen(record(), silent_s=3.4), pools=pools)
    problems = problems_of(found, pools, reason="", redis="ok")
    effect = effect_of(reason="", num_moved=3, pools=pools)
    assert headline(problems, pools, found, effect) == (
        "decode-0 is loading: started 2 s ago; its previous process was ended by SIGKILL. "
        "3 requests moved to other workers; requests are served. "
        "Nothing has to be done about decode-0: a worker takes requests when its model is loaded."
    )
    rest = [replace(found[0], worker_id=f"decode-{n}") for n in range(1, 4)]
    assert "done about decode-0, decode-1, decode-2: a worker takes" in remedy_of(found + rest[:2])
    assert "done about these 4 workers: a worker takes" in remedy_of(found + rest)
    assert effect_of(reason="no decode worker", num_moved=0, pools=pools).startswith("Requests are")
    no_prefill = {**pools, "prefill": {"ready": 0, "serving": 0}}
    assert effect_of(reason="", num_moved=0, pools=no_prefill) == (
        "Requests are served, and decode workers prefill the prompts."
    )
    drained = agent("running", since=NOW - 2, exit="exit status 0", last_line="")
    (row,) = rows(pools=drained)
    assert row.note.endswith("its previous process ended normally")


def with_(worker_id: str, **changes: Any) -> WorkerRecord:
    return msgspec.structs.replace(record(worker_id), **changes)


def test_a_worker_that_serves_may_be_in_trouble() -> None:
    blames = with_("decode-1", unreachable={"prefill-0": "it was silent"})
    found = rows(
        Seen(record("decode-0"), clock_ahead_s=300.2),
        Seen(blames),
        Seen(with_("decode-2", disk_free_bytes=0, disk_total_bytes=1 << 25)),
        Seen(with_("decode-3", disk_free_bytes=2 << 30, disk_total_bytes=1 << 44)),
        Seen(record("prefill-0")),
    )
    assert [(row.state, row.problem) for row in found] == [
        ("ready", "clock"),
        ("ready", ""),
        ("ready", "disk"),
        ("ready", ""),
        ("ready", "unreachable"),
    ]
    assert found[0].note == "its clock is 300 s ahead of this router's clock"
    assert found[4].note == (
        "decode-1 cannot read KV blocks from it: it was silent. Is the network between them down?"
    )
    tiers = TierUse("host", 9, 9), TierUse("disk", 9, 9, blocks_damaged=31)
    (damaged,) = rows(Seen(with_("decode-0", tiers=tiers)))
    assert (damaged.state, damaged.problem) == ("ready", "tier")
    assert (
        damaged.note
        == "copies of KV blocks could not be read in the last 10 minutes: 31 in the disk tier"
    )
    lonely = with_("decode-9", unreachable={"prefill-0": "token", "decode-0": "token"})
    found = rows(Seen(record("decode-0")), Seen(lonely), Seen(record("prefill-0")))
    assert [row.is_well for row in found] == [True, False, True]
    assert found[1].note == "it cannot read KV blocks from prefill-0 and 1 more: token"
    (_, peer) = rows(Seen(blames, silent_s=9), Seen(record("prefill-0")))
    assert peer.is_well, "a worker that is silent itself may be what is cut off"


def test_a_router_whose_own_clock_is_wrong_blames_no_worker() -> None:
    found = rows(*[Seen(record(f"decode-{n}"), clock_ahead_s=-300) for n in range(3)])
    assert all(row.is_well for row in found)
    assert clock_of_router([-300.0] * 3) == -300.0
    assert clock_of_router([-300.0] * 2) == 0.0, "two cannot outvote it"


def test_a_host_that_is_silent_is_named_once() -> None:
    away = [
        Seen(with_(name, address="10.0.0.9:1"), silent_s=5) for name in ("decode-1", "prefill-1")
    ]
    found = rows(Seen(record()), *away)
    told = sentence(found, POOLS)
    assert told == (
        "Host h (10.0.0.9) is down or cut off, with all its workers: decode-1, prefill-1."
    )


def test_a_notice_counts_while_it_changes() -> None:
    loading = LoadingWorkers()
    notice = LoadingNotice("decode", 1, 9, 1)
    assert loading.note({"a": notice}, now=0.0) == []
    assert loading.now(2.9, ttl_s=3) == {"a": LoadingNow(notice, 2.9)}
    assert loading.now(3.5, ttl_s=3) == {"a": LoadingNow(notice, 3.5, 3.5)}
    loading.note({"a": LoadingNotice("decode", 1, 9, 2)}, now=4.0)
    assert loading.now(4.5, ttl_s=3)["a"].silent_s == 0.0
    assert loading.now(4.5, ttl_s=3)["a"].stalled_s == 4.5, "no byte more was loaded"
    for second in range(5, 64):
        assert loading.note({"a": LoadingNotice("decode", 1, 9, 2)}, now=float(second)) == []
    assert loading.note({"a": LoadingNotice("decode", 1, 9, 2)}, now=64.1) == ["a"]
    assert loading.note({}, now=65.0) == []


POOLS: dict[str, Any] = {"prefill": {"ready": 2}, "decode": {"ready": 1}}


def test_the_headline_names_what_is_wrong_the_worst_first() -> None:
    found = rows(
        Seen(record("decode-0"), silent_s=12),
        Seen(record("decode-1"), stuck_s=5),
        Seen(record("prefill-0"), is_compatible=False),
    )
    told = sentence(found, POOLS, reason="no decode worker is ready")
    assert told == (
        "No decode worker is ready; decode-0 is silent: it has not reported for 12 s; and 2 more."
    )
    assert sentence(found[:1], POOLS, redis="lost").startswith("Redis does not answer")


def test_the_headline_of_a_cluster_that_is_well_says_so() -> None:
    left = Gone(record("decode-1"), NOW, has_left=True)
    found = rows(Seen(record()), Seen(record("prefill-0", "draining")), gone=(left,))
    told = sentence(found, POOLS)
    assert told == "All is well: 2 prefill and 1 decode workers are ready."


def test_what_serves_is_not_missed_before_its_agent_has_reported() -> None:
    unheard = {"wanted": 1, "running": 0}
    pools = {"router": dict(unheard), "decode": {**unheard, "ready": 1}}
    assert sentence([], pools) == "All is well: 1 decode worker is ready."
    pools["router"]["wanted"] = 2
    assert sentence([], pools) == "The router pool has 1 of 2 wanted processes."


def test_the_headline_counts_processes_that_no_row_explains() -> None:
    pools: dict[str, dict[str, Any]] = {"decode": {"wanted": 3, "running": 1, "ready": 1}}
    told = sentence(rows(Seen(record())), pools)
    assert told == "The decode pool has 1 of 3 wanted processes."
    pools["decode"]["waits_why"] = "no GPU is free"
    told = sentence(rows(Seen(record())), pools)
    assert told == "The decode pool has 1 of 3 wanted processes: no GPU is free."
