"""A host that leaves: what it waits for before it drains, and that it always has time to drain."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tandem.cluster.launch import leave
from tandem.cluster.launch.leave import Leaving
from tandem.common.process.progress import ProgressRow

HERE, THERE = "host-here", "host-there"


class FakeRedis:
    """Pools that a test scripts; a router counts as ready once it has run for some seconds."""

    def __init__(self, pools: Callable[[set[str]], dict[str, Any]]) -> None:
        self.words: set[str] = set()
        self._pools = pools

    def get(self, key: str) -> bytes:
        return json.dumps(self._pools(self.words)).encode()

    def sadd(self, key: str, *words: str) -> None:
        self.words |= set(words)

    def srem(self, key: str, *words: str) -> None:
        self.words -= set(words)

    def close(self) -> None: ...


def agent(host: str, state: str = "running") -> dict[str, Any]:
    return {"id": "router-0", "host": host, "state": state, "since": time.time() - 60}


def left(
    monkeypatch: pytest.MonkeyPatch,
    pools: Callable[[set[str]], dict[str, Any]],
    shown: list[ProgressRow] | None = None,
) -> tuple[list[str], FakeRedis]:
    """Returns what was said while the host left, and the Redis after that."""
    redis = FakeRedis(pools)
    said = list[str]()
    shown = shown if shown is not None else []
    monkeypatch.setattr(leave, "connect_blocking", lambda _: redis)
    monkeypatch.setattr(leave, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(leave, "_SETTLED_S", 0.2)
    urls = {"controller_url": "", "worker_url": ""}
    leaving = Leaving(**urls, cluster_id="c", host_id=HERE)
    leaving.run(said.append, lambda: None, shown.append)
    return said, redis


def test_a_member_that_no_other_host_takes_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of two hosts has one of two routers. The one that leaves still drains."""

    def pools(words: set[str]) -> dict[str, Any]:
        own = [] if f"{HERE} drains" in words else [agent(HERE)]
        return {"router": {"wanted": 2, "agents": [*own, agent(THERE)]}}

    said, redis = left(monkeypatch, pools)
    assert said == [
        "[yellow]this host leaves now; on the other hosts, these pools do not have enough "
        "processes yet: router",
        "draining the routers and workers of this host",
    ]
    assert not redis.words


@pytest.mark.parametrize("when", [HERE, f"{HERE} drains"])
def test_a_redis_that_lost_the_wish_hears_it_again(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(leave, "LEAVE_DEADLINE_S", 70.0)  # of which 10 s are for other hosts
    started = time.monotonic()
    lost = list[bool]()

    def pools(words: set[str]) -> dict[str, Any]:
        if when in words and not lost:
            lost.append(True)
            words.clear()
            return {"router": {"wanted": 1, "agents": [agent(HERE)]}}
        others = [agent(THERE)] if HERE in words else []
        own = [] if f"{HERE} drains" in words else [agent(HERE)]
        return {"router": {"wanted": 1, "agents": [*own, *others]}}

    said, redis = left(monkeypatch, pools)
    assert said == ["draining the routers and workers of this host"]
    assert lost
    assert not redis.words
    assert time.monotonic() - started < 5


def test_what_starts_elsewhere_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()

    def pools(words: set[str]) -> dict[str, Any]:
        is_up = time.monotonic() - started > 1.0  # longer than all that is placed has settled
        own = [] if f"{HERE} drains" in words else [agent(HERE)]
        there = agent(THERE, "running" if is_up else "pending")
        return {"router": {"wanted": 1, "agents": [*own, there]}}

    shown = list[ProgressRow]()
    said, _ = left(monkeypatch, pools, shown)
    assert said == ["draining the routers and workers of this host"]
    assert set(shown) == {
        ProgressRow("hand over", "waiting for other hosts to start enough processes of: router")
    }
    assert time.monotonic() - started > 1.0


def test_a_process_that_never_starts_leaves_time_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave, "LEAVE_DEADLINE_S", 60.5)
    drained = list[float]()

    def pools(words: set[str]) -> dict[str, Any]:
        if f"{HERE} drains" in words:
            drained.append(time.monotonic())
        is_gone = bool(drained) and time.monotonic() - drained[0] > 0.3
        own = [] if is_gone else [agent(HERE)]
        return {"router": {"wanted": 1, "agents": [*own, agent(THERE, "restarting")]}}

    shown = list[ProgressRow]()
    said, redis = left(monkeypatch, pools, shown)
    assert said[-1] == "draining the routers and workers of this host"
    assert shown[-1] == ProgressRow("drain", "waiting for router-0 to end", 0, 1)
    assert len(drained) > 1
    assert not redis.words
