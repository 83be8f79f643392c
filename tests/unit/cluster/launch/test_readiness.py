"""The wait for a cluster that starts: what ends it, and what does not."""

from __future__ import annotations

import time as real_time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from tandem.cluster.launch import readiness as readiness_module
from tandem.cluster.launch.options import LaunchOptions
from tandem.cluster.launch.readiness import Readiness
from tandem.cluster.launch.screen import LaunchScreen
from tandem.cluster.pools import Member
from tandem.errors import ConfigError
from tandem.net.store.registry import LoadingNotice
from tests.harness.terminal import Terminal


class FakeRedis:
    """Redis that does not answer for records, and where a worker tells what it has loaded."""

    def __init__(self, loaded: Iterator[int]) -> None:
        self._loaded = loaded

    def get(self, key: str) -> bytes:
        raise RedisTimeoutError("slow")

    def hvals(self, key: str) -> list[bytes]:
        notice = LoadingNotice("decode", num_bytes=next(self._loaded), num_bytes_all=100)
        return [msgspec.msgpack.encode(notice)]

    def close(self) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that `sleep` has let pass: a minute each time."""
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += 60.0

    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(readiness_module, "time", fake)
    return now


def waited(monkeypatch: pytest.MonkeyPatch, loaded: Iterator[int]) -> None:
    monkeypatch.setattr(readiness_module, "connect_blocking", lambda _: FakeRedis(loaded))
    options = LaunchOptions()
    readiness = Readiness(options, "c", "redis://h", LaunchScreen(options))
    lives: Any = SimpleNamespace(wait=lambda _: False, log_path=Path("log"))
    readiness.add(Member("decode-0", "decode", ordinal=0), lives)
    with readiness.screen.bars():
        readiness.wait()


def test_a_start_without_progress_is_given_up(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no progress for 300 s while it waited for decode-0"):
        waited(monkeypatch, iter([0] * 100))
    assert 300 < clock[0] < 500


def test_a_model_that_loads_for_long_is_waited_for(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no progress"):
        waited(monkeypatch, iter([*range(60), *[60] * 100]))
    assert clock[0] > 3600


def test_a_terminal_shows_what_the_start_waits_for(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly() -> Iterator[int]:
        while True:
            real_time.sleep(0.1)
            yield 41

    with Terminal() as terminal:
        with pytest.raises(ConfigError, match="no progress"):
            waited(monkeypatch, slowly())
        for text in ("0 of 1 ready; waiting for decode-0", "41% of 1e-07 GB"):
            assert text in terminal.text
