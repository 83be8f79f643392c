"""Each end is told once, by name; one that was over before it was watched, too."""

from __future__ import annotations

import os
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


def test_output_and_its_end_are_told_as_often_as_they_are_watched() -> None:
    read_end, write_end = os.pipe()
    watch = EndWatch()
    watch.add_output("a", read_end)
    assert watch.wait(0.0) is None
    os.write(write_end, b"line\n")
    assert watch.wait() == "a"
    assert watch.wait(0.0) is None
    assert os.read(read_end, 10) == b"line\n"
    watch.add_output("a", read_end)
    assert watch.wait(0.0) is None
    os.close(write_end)
    assert watch.wait() == "a"
    watch.close()
    os.close(read_end)
