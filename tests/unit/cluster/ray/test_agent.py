"""An agent without Ray: what it keeps after a restart, and which changes its controller hears."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray
from redis import Redis

from tandem.cluster.pools import ClusterSpec, Member, MemberState, PoolCommand
from tandem.cluster.processes import guardian, process
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.cluster.processes.keeper import Keepers
from tandem.cluster.processes.owned import Owned, write_spec
from tandem.cluster.ray import agent as agent_module
from tandem.cluster.ray.agent import Agent, RemoteAgent, Seen
from tandem.common.config.cluster import (
    CLUSTER_ID_VARIABLE,
    REDIS_URL_VARIABLE,
    RUN_FOLDER_VARIABLE,
)
from tests.harness.waiting import wait_until

WAIT = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
CLUSTER = "agent-test"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterSpec]:
    """The spec of host h, whose agent is tested."""
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(CLUSTER_ID_VARIABLE, CLUSTER)
    spec = ClusterSpec(
        cluster_id=CLUSTER,
        run_folder=str(tmp_path),
        pools={"decode": PoolCommand(WAIT)},
        wanted={"decode": 1},
        cores=[],
        drain_deadline_s=10.0,
        host_id="h",
    )
    write_spec(tmp_path, spec)
    yield spec
    guardian.end_cluster(CLUSTER, 0.1)


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redis]:
    with EmbeddedRedis(tmp_path / "redis") as server, Redis.from_url(server.url) as client:
        monkeypatch.setenv(REDIS_URL_VARIABLE, server.url)
        yield client


def a_member(number: int, state: MemberState = "pending", host: str = "h") -> Member:
    return Member(f"decode-{number}", "decode", number, state=state, host=host)


def until(agent: Agent, seen: Seen, **states: MemberState) -> tuple[Seen, dict[str, int]]:
    """Reads changes until the processes have these states. Returns what was seen, and the pids."""
    pids: dict[str, int] = {}
    now: dict[str, MemberState] = {}
    while now != {name.replace("_", "-"): state for name, state in states.items()}:
        seen, reports = agent.changes(seen)
        for report in reports:
            now[report.keeper_name.rpartition("-")[0]] = report.state
            pids[report.keeper_name.rpartition("-")[0]] = report.pid
    return seen, pids


def own(*members: Member) -> bytes:
    return msgspec.json.encode(Owned({"decode": len(members)}, list(members)))


@pytest.mark.timeout(60)
def test_a_restarted_agent_keeps_the_processes_of_its_host(
    spec: ClusterSpec, redis: Redis, tmp_path: Path
) -> None:
    """The controller may be down. The processes of other hosts and those of a lost host are none
    of its business; one that drained is ended for good."""
    members = [a_member(0, "running"), a_member(1, "draining"), a_member(2, "lost")]
    redis.set(f"{{tandem:{CLUSTER}}}:owned", own(*members, a_member(3, "running", host="other")))
    agent = Agent(spec, None)
    seen, pids = until(agent, ("", 0), decode_0="running", decode_1="gone")
    assert [found.process_id for found in process.find_all(tmp_path)] == ["decode-0"]

    # the next one, as Ray makes it, adopts the process
    again = Agent(spec, None)
    seen, now = until(again, seen, decode_0="running", decode_1="gone")
    assert now["decode-0"] == pids["decode-0"]
    for each in (agent, again):
        each.drain(members[0].keeper_name)
    until(again, seen, decode_0="gone")


@pytest.mark.timeout(60)
def test_changes_are_heard_once_and_a_new_controller_hears_all(
    spec: ClusterSpec, redis: Redis
) -> None:
    known = [a_member(0), a_member(1)]
    redis.set(f"{{tandem:{CLUSTER}}}:owned", own(*known))
    agent = Agent(spec, None)
    for member in known:
        agent.keep(member)  # it may know them already
    seen, pids = until(agent, ("", 0), decode_0="running", decode_1="running")

    heard: list[tuple[Seen, list[str]]] = []

    def listen() -> None:
        now, reports = agent.changes(seen)
        heard.append((now, [report.state for report in reports]))

    waits = threading.Thread(target=listen)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive(), "nothing has changed"

    # a new controller; the call of the old one ends, or such calls would use up the agent's threads
    new, all_pids = until(agent, ("", 0), decode_0="running", decode_1="running")
    assert all_pids == pids
    next_call = threading.Thread(target=agent.changes, args=(new,))
    next_call.start()
    waits.join(30)
    assert heard == [(seen, [])]

    agent.drain(known[1].keeper_name)
    next_call.join(30)
    last, _ = until(agent, new, decode_1="gone")
    seen, reports = agent.changes(("", 0))
    assert {report.keeper_name: report.state for report in reports} == {
        known[0].keeper_name: "running",
        known[1].keeper_name: "gone",  # nobody has said yet that it was heard
    }
    agent.drain(known[0].keeper_name)
    until(agent, last, decode_0="gone")
    _, reports = agent.changes(("", 0))
    assert [report.keeper_name for report in reports] == [known[0].keeper_name]


def test_an_agent_without_redis_starts_nothing(
    spec: ClusterSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first members may be long gone, and only Redis knows. The controller's call counts."""
    known: list[Owned | None] = [Owned({}, []), None, None]  # the last one is read first
    answers = iter(lambda: known.pop() if known else Owned({}, []), 0)
    monkeypatch.setattr(Keepers, "read_owned", lambda _: next(answers))
    monkeypatch.setattr(agent_module, "_RETRY_S", 0.1)
    agent = Agent(spec, None)
    assert agent.changes(("", 0))[1] == []
    wait_until(lambda: not known, 30)
    assert agent.changes(("", 0))[1] == []
    monkeypatch.setattr(Keepers, "read_owned", lambda _: Owned({}, [a_member(0)]))
    agent.keep(a_member(0))
    seen, _ = until(agent, ("", 0), decode_0="running")
    assert [found.process_id for found in process.find_all(tmp_path)] == ["decode-0"]
    agent.drain(a_member(0).keeper_name)
    until(agent, seen, decode_0="gone")


class InProcess:
    """Calls of an agent's method as Ray's handle makes them, each in a thread."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.num_calls = 0

    def remote(self, *arguments: Any) -> InProcess:
        self.num_calls += 1
        self._ended: Future[Any] = Future()
        ended = self._ended
        threading.Thread(
            target=lambda: ended.set_result(self._method(*arguments)), daemon=True
        ).start()
        return self

    def future(self) -> Future[Any]:
        return self._ended


def no_actor(name: str) -> None:
    raise ValueError(name)


def test_two_controllers_do_not_call_an_agent_without_pause(
    spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that cannot reach Redis does not know yet that another one has replaced it, and
    each one's call ends that of the other."""
    monkeypatch.setattr(Keepers, "read_owned", lambda _: Owned({}, []))
    calls = InProcess(Agent(spec, None).changes)
    monkeypatch.setattr(RemoteAgent, "_connect", lambda _: SimpleNamespace(changes=calls))
    monkeypatch.setattr(ray, "get_actor", no_actor)
    posted: Queue[Callable[[], None]] = Queue()
    for _ in range(2):
        RemoteAgent(
            "agent-h",
            spec,
            None,
            replaces="",
            resources={},
            labels={},
            post=posted.put,
            report=lambda _: None,
        )
    until_s = time.monotonic() + 2 * agent_module._RETRY_S
    while (left_s := until_s - time.monotonic()) > 0:
        with suppress(Empty):
            posted.get(timeout=left_s)()
    assert calls.num_calls <= 12
