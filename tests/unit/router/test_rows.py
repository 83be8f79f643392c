"""Rows of workers that are known, and the sentence that says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.workers.rows import Gone, Seen, WorkerRow, headline, worker_rows
from tandem.store.registry import KvCompatibility, WorkerRecord

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


@pytest.mark.parametrize(
    ("seen", "state", "note"),
    [
        (Seen(record()), "ready", ""),
        (Seen(record(), silent_s=12.3), "silent", "it has written nothing for 12 s"),
        (Seen(record(), stuck_s=9), "hung", "its engine has work and made no turn for 9 s"),
        (Seen(record(), is_compatible=False), "incompatible", "it serves another model"),
        (Seen(record(), is_connected=False), "not connected", "no stream to 10.0.0.1:5000"),
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
    assert (row.state, row.note) == ("restarting", f"attempt 4, its last log line: {line}")
    (row,) = rows(Seen(record()), pools=agent("restarting"))
    assert row.state == "restarting", "the record of the process that ended has not expired yet"
    (row,) = rows(pools=agent("running", since=NOW - 7))
    assert (row.state, row.note) == ("loading", "for 7 s")
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
    (row,) = rows(gone=gone[:1], pools=agent("running"))
    assert row.state == "loading", "its agent knows more"


POOLS = {"prefill": {"ready": 2}, "decode": {"ready": 1}}


def test_the_headline_names_what_is_wrong_the_worst_first() -> None:
    found = rows(
        Seen(record("decode-0"), silent_s=12),
        Seen(record("decode-1"), stuck_s=5),
        Seen(record("prefill-0"), is_compatible=False),
    )
    told = headline(found, POOLS, reason="no decode worker is ready", redis="ok")
    assert told == (
        "No decode worker is ready; decode-0 is silent: it has written nothing for 12 s; and 2 "
        "more."
    )
    assert headline(found[:1], POOLS, reason="", redis="lost").startswith("Redis does not answer")


def test_the_headline_of_a_cluster_that_is_well_says_so() -> None:
    left = Gone(record("decode-1"), NOW, has_left=True)
    found = rows(Seen(record()), Seen(record("prefill-0", "draining")), gone=(left,))
    told = headline(found, POOLS, reason="", redis="ok")
    assert told == "All is well: workers that are ready: 2 prefill, 1 decode."


def test_the_headline_counts_processes_that_no_row_explains() -> None:
    pools = {"decode": {"wanted": 3, "running": 1, "ready": 1}}
    told = headline(rows(Seen(record())), pools, reason="", redis="ok")
    assert told == "The decode pool has 1 of 3 wanted processes."
