"""Work that was sent to a worker counts until the worker reports a later load."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from tandem.common.perf_model.predict import NO_PREFILL, Prefill
from tandem.common.worker_load import WorkerLoad
from tandem.net.store.registry import WorkerRecord
from tandem.router.workers.known_worker import KnownWorker
from tests.harness.scripted_worker import compatibility


def record(**load: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id="p",
        epoch="1",
        role="prefill",
        state="ready",
        address="here:1",
        metrics_address="",
        host="here",
        pid=1,
        model="m",
        max_model_len=100,
        compatibility=compatibility("f"),
        load=WorkerLoad(**load),
    )


def seen(worker: KnownWorker) -> tuple[int, int]:
    load = worker.snapshot(compatible=True).load
    return load.queued_tokens, load.num_leases


def test_what_a_record_cannot_show_yet_is_kept() -> None:
    worker = KnownWorker(record(queued_tokens=5))
    worker.note_prefill(Prefill.of(100, 0), 10.1, forgotten_before=8.0)
    worker.note_prefill(Prefill.of(200, 0), 10.4, forgotten_before=8.0)
    assert seen(worker) == (305, 2)
    # Read last at 10.2, now again: it was written in between, when the second was on its way maybe.
    told = record(queued_tokens=90, num_leases=1, step=1)
    assert worker.take_record(told, last_read_at=10.2, forgotten_before=8.5)
    assert seen(worker) == (290, 2)
    assert not worker.take_record(told, last_read_at=10.7, forgotten_before=9.0)
    assert seen(worker) == (290, 2)
    later = replace(told, load=WorkerLoad(queued_tokens=250, num_leases=2, step=2))
    assert worker.take_record(later, last_read_at=11.2, forgotten_before=9.5)
    assert seen(worker) == (250, 2)


def test_a_worker_has_work_from_the_first_prompt_until_its_record_shows_none() -> None:
    worker = KnownWorker(record())
    assert not worker.has_work
    worker.note_prefill(Prefill.of(100, 0), 10.1, forgotten_before=8.0)
    assert worker.has_work
    for load in ({"num_running": 1}, {"num_waiting": 1}, {"num_leases": 1}):
        worker.take_record(record(step=1, **load), last_read_at=10.7, forgotten_before=10.5)
        assert worker.has_work
    worker.take_record(record(step=2), last_read_at=11.2, forgotten_before=11.0)
    assert not worker.has_work


def test_what_never_reached_the_worker_is_forgotten() -> None:
    worker = KnownWorker(record())
    worker.note_prefill(Prefill.of(100, 0), 10.1, forgotten_before=8.0)
    assert not worker.take_record(record(), last_read_at=10.6, forgotten_before=10.0)
    assert seen(worker) == (100, 1)
    assert worker.take_record(record(), last_read_at=11.6, forgotten_before=11.0)
    assert seen(worker) == (0, 0)
    # Without records, as when Redis is lost, the list of what was sent stays short too.
    for at in range(100):
        worker.note_prefill(Prefill.of(1, 0), at, forgotten_before=at - 2.0)
    assert seen(worker) == (3, 3)


def test_what_is_done_counts_no_more() -> None:
    worker = KnownWorker(record(queued_tokens=500, step=1))
    worker.note_prefill(Prefill.of(100, 0), 10.1, forgotten_before=8.0)
    worker.note_prefilled(Prefill.of(100, 0), 10.1, by_it=True)  # before any record showed it
    assert seen(worker) == (500, 0)
    worker.note_prefilled(Prefill.of(200, 0), 9.0, by_it=True)  # the record shows it still
    worker.note_prefilled(
        Prefill.of(70, 0), 9.1, by_it=False
    )  # its decode worker did it: who knows what it shows
    assert seen(worker) == (300, 0)
    assert worker.take_record(
        record(queued_tokens=280, step=2), last_read_at=10.2, forgotten_before=8.5
    )
    assert seen(worker) == (280, 0)
    worker.note_prefilled(Prefill.of(900, 0), 9.2, by_it=True)
    assert seen(worker) == (0, 0)


def stream(**fields: Any) -> Any:
    """A router's stream to a worker."""
    values = {"is_up": True, "is_draining": False, "unreported": deque(), "num_inflight": 0}
    return SimpleNamespace(load=None, **(values | fields))


def test_a_prefill_worker_decodes_while_its_stream_is_up() -> None:
    worker = KnownWorker(record())
    assert not worker.snapshot(compatible=True).decodes
    worker.client = stream()
    assert worker.snapshot(compatible=True).decodes
    for client in (stream(is_up=False), stream(is_draining=True)):
        worker.client = client
        seen = worker.snapshot(compatible=True)
        assert not seen.decodes
        assert seen.usable  # for prefill
    worker.client = stream()
    worker.record = replace(worker.record, role="decode")
    assert not worker.snapshot(compatible=True).decodes


def test_a_prefill_worker_counts_what_it_decodes_and_prefills() -> None:
    worker = KnownWorker(record(num_running=1, queued_tokens=10))
    worker.client = stream(unreported=deque([NO_PREFILL]), num_inflight=3)
    worker.note_prefill(Prefill.of(100, 0), 10.1, forgotten_before=8.0)
    load = worker.snapshot(compatible=True).load
    assert (load.num_running, load.queued_tokens) == (3, 110)
