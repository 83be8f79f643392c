"""Ray's head and the pool controller, as a router reads their signs of life."""

from __future__ import annotations

import msgspec

from tandem.net.store.control_state import ControllerBeat, Head
from tandem.router.workers.control_watch import ControlWatch


def note(
    watch: ControlWatch, now: float, beat: ControllerBeat | None, head: Head | None = None
) -> str:
    encoded = [None if each is None else msgspec.json.encode(each) for each in (beat, head)]
    return watch.note(has_pools=True, beat=encoded[0], head=encoded[1], now=now)


def test_a_cluster_without_a_controller_has_no_problem() -> None:
    watch = ControlWatch()
    for second in range(60):
        watch.note(has_pools=False, beat=None, head=None, now=float(second))
    assert (watch.problems, watch.is_kept) == ({}, False)


def test_a_controller_whose_beat_stands_still_is_named() -> None:
    watch = ControlWatch()
    for second in range(10):
        assert not note(watch, float(second), ControllerBeat(7, second))
    assert not watch.problems
    for second in range(10, 16):
        note(watch, float(second), ControllerBeat(7, 9))
    assert watch.problems["controller"].startswith("the pool controller has not reported for 6 s")
    told = note(watch, 16.0, ControllerBeat(8, 1))
    assert told == "the pool controller was restarted: process 8 replaced process 7"
    assert not watch.problems


def test_the_time_without_redis_is_no_silence() -> None:
    watch = ControlWatch()
    note(watch, 0.0, ControllerBeat(7, 1))
    note(watch, 60.0, ControllerBeat(7, 1))
    assert not watch.problems


def test_a_head_that_is_gone_is_named_with_what_ended() -> None:
    watch = ControlWatch()
    up = Head(0, "", "127.0.0.1:1")
    note(watch, 0.0, ControllerBeat(7, 1), up)
    gone = Head(0, "", "", "gcs_server ended")
    note(watch, 1.0, ControllerBeat(7, 1), gone)
    note(watch, 3.0, ControllerBeat(7, 1), gone)
    assert watch.problems["head"].startswith("Ray's head has been down for 2 s (gcs_server ended)")
    note(watch, 4.0, ControllerBeat(8, 1), up)
    assert not watch.problems


def test_the_first_head_of_a_cluster_is_awaited_and_no_problem() -> None:
    for number in (0, 1):
        watch = ControlWatch()
        starts = msgspec.json.encode(Head(number, ""))
        watch.note(has_pools=False, beat=None, head=starts, now=0.0)
        assert watch.head_is_starting
        note(watch, 1.0, ControllerBeat(7, 1), Head(number, "", "127.0.0.1:1"))
        assert (watch.head_is_starting, watch.problems) == (False, {})
    watch = ControlWatch()
    note(watch, 0.0, ControllerBeat(7, 1), Head(0, ""))  # the pools come before the head's address
    assert not watch.problems


def test_a_lease_that_has_ended_names_the_host_that_had_it() -> None:
    watch = ControlWatch()
    note(watch, 0.0, ControllerBeat(7, 1), Head(1, "10.0.0.1", "10.0.0.1:1"))
    for second in range(1, 4):
        note(watch, float(second), ControllerBeat(7, 1), None)
    assert "for 2 s (host 10.0.0.1 stopped renewing its lease)" in watch.problems["head"]
    note(watch, 4.0, ControllerBeat(9, 1), Head(2, "10.0.0.2", "10.0.0.2:1"))
    assert not watch.problems
