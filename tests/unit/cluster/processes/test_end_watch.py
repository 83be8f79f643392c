"""Each end is told once, by name; one that was over before it was watched, too."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tandem.cluster.processes.end_watch import EndWatch


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield started
    for each in started:
        each.kill()
        each.wait()


def test_who_ended_is_told(sleepers: list[subprocess.Popen[bytes]]) -> None:
    watch = EndWatch()
    for name, each in zip("ab", sleepers, strict=True):
        watch.add(name, each.pid)
    sleepers[1].kill()
    assert watch.wait() == "b"
    sleepers[0].kill()
    assert watch.wait() == "a"


def test_one_that_is_gone_has_ended(sleepers: list[subprocess.Popen[bytes]]) -> None:
    sleepers[0].kill()
    sleepers[0].wait()
    watch = EndWatch()
    watch.add("a", sleepers[0].pid)
    assert watch.wait() == "a"


def test_who_is_forgotten_is_not_told(sleepers: list[subprocess.Popen[bytes]]) -> None:
    watch = EndWatch()
    for name, each in zip("ab", sleepers, strict=True):
        watch.add(name, each.pid)
    watch.forget("a")
    for each in sleepers:
        each.kill()
    assert watch.wait() == "b"
    watch.add("a", sleepers[0].pid)  # a name that was forgotten may be watched again
    assert watch.wait() == "a"
