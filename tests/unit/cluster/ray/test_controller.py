"""The pool controller without Ray: what it keeps when a disk, a host or Redis is lost."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from redis import Redis

from tandem.cluster.pools import ClusterSpec, Host, Member, PoolCommand
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.cluster.processes.head_lease import HeadLease
from tandem.cluster.processes.owned import Owned, SharedOwned, read
from tandem.cluster.ray import controller as controller_module
from tandem.cluster.ray.agent import RemoteAgent
from tandem.cluster.ray.controller import PoolController
from tandem.cluster.ray.node import HOST_LABEL
from tandem.common.config.cluster import REDIS_URL_VARIABLE
from tests.harness.cluster import wait_for


def a_spec(folder: Path, **changes: Any) -> ClusterSpec:
    """Returns the spec of a cluster with a pool of one decode worker."""
    told: dict[str, Any] = {
        "cluster_id": "c",
        "run_folder": str(folder),
        "pools": {"decode": PoolCommand(["true"])},
        "wanted": {"decode": 1},
        "cores": [],
    }
    return ClusterSpec(**{**told, **changes})


@pytest.fixture
def without_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module.ScaleChannel, "start", lambda _: None)
    monkeypatch.setattr(controller_module.ScaleChannel, "publish", lambda *_: None)
    monkeypatch.setenv(REDIS_URL_VARIABLE, "redis://127.0.0.1:1")


@pytest.mark.usefixtures("without_redis")
def test_a_full_disk_stops_no_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started that is not written down, and all of it is once there is room again."""
    is_full = [True]
    attached = list[str]()
    write = Owned.write

    def write_if_room(self: Owned, run_folder: Path) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, run_folder)

    def attach(self: Any, member: Any) -> None:
        attached.append(member.member_id)

    monkeypatch.setattr(Owned, "write", write_if_room)
    monkeypatch.setattr(PoolController, "_attach", attach)
    monkeypatch.setattr(controller_module, "_RETRY_S", 0.01)
    controller = PoolController(a_spec(tmp_path))
    controller.scale({"decode": 2})
    time.sleep(0.1)
    assert not attached
    is_full[0] = False
    give_up_at = time.monotonic() + 30
    while sorted(attached) != ["decode-0", "decode-1"]:
        assert time.monotonic() < give_up_at, attached
        time.sleep(0.01)
    kept = read(tmp_path)
    assert kept is not None
    assert [member.member_id for member in kept.members] == ["decode-0", "decode-1"]


@pytest.mark.usefixtures("without_redis")
def test_a_member_that_drained_with_its_node_is_not_kept_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that may still run keeps its name; one whose end was reported needs none."""
    monkeypatch.setattr(PoolController, "_attach", lambda *_: None)
    monkeypatch.setattr(controller_module.HostWatch, "is_lost", lambda _, host: host == "gone")
    there = [
        Member("decode-0", "decode", 0, state="draining", host="gone", since=1.0),
        Member("decode-1", "decode", 1, state="draining", host="gone", since=1.0, pid=7),
        Member("decode-2", "decode", 2, state="running", host="gone", since=1.0, pid=8),
        Member("decode-3", "decode", 3, state="draining", host="there", since=1.0),
    ]
    Owned({"decode": 0}, there).write(tmp_path)
    PoolController(a_spec(tmp_path, wanted={"decode": 0}, on_nodes=True))

    def states() -> dict[str, str]:
        kept = read(tmp_path)
        assert kept is not None
        return {member.member_id: member.state for member in kept.members}

    give_up_at = time.monotonic() + 30
    expected = {"decode-1": "lost", "decode-2": "lost", "decode-3": "draining"}
    while states() != expected:
        assert time.monotonic() < give_up_at, states()
        time.sleep(0.01)


@pytest.mark.usefixtures("without_redis")
def test_the_agent_of_a_host_that_has_left_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of a host that is lost for now, and has members, waits for its host."""
    ended = list[RemoteAgent]()
    monkeypatch.setattr(RemoteAgent, "end", lambda agent: ended.append(agent))
    lost = Member("decode-0", "decode", 0, state="lost", host="lost")
    Owned({"decode": 0}, [lost]).write(tmp_path)
    controller = PoolController(a_spec(tmp_path, wanted={"decode": 0}))
    agents = {host: RemoteAgent.__new__(RemoteAgent) for host in ("left", "lost")}
    controller._agents.update(agents)
    controller.scale({"decode": 0})
    wait_for(lambda: ended, deadline_s=30, what="the end of the agent")
    assert ended == [agents["left"]]
    assert controller._agents.keys() == {"", "lost"}


def test_a_restarted_controller_keeps_the_members_of_a_head_that_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is restarted with the spec of its first start, when that host was lost. Members are placed
    on a host that is expected and has not joined yet."""
    nodes = [{"Alive": True, "Labels": {HOST_LABEL: host}} for host in ("a", "back")]
    attached = dict[str, str]()
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(PoolController, "_attach", lambda _, m: attached.update({m.pool: m.host}))
    monkeypatch.setattr(controller_module.HostWatch, "start", lambda *_: None)
    monkeypatch.setattr(controller_module.ScaleChannel, "start", lambda _: None)
    with EmbeddedRedis(tmp_path / "redis", cluster_id="c") as redis:
        url = redis.url_of("controller")
        monkeypatch.setenv(REDIS_URL_VARIABLE, url)
        number = HeadLease(url, "c", "a").take() or 0
        hosts = [Host("a", []), Host("back", []), Host("expected", [])]
        there = [
            Member("decode-0", "decode", 0, state="running", host="a", pid=7),
            Member("decode-1", "decode", 1, state="running", host="back", pid=8),
        ]
        shared = SharedOwned(url, "c", number)
        assert shared.write(Owned({"decode": 2, "prefill": 1}, there, number, hosts))
        pools = dict.fromkeys(("decode", "prefill"), PoolCommand(["true"]))
        hosts_of = {"host_id": "a", "host_before": "back"}
        controller = PoolController(a_spec(tmp_path, pools=pools, number=number, **hosts_of))
        wait_for(lambda: "prefill" in attached, deadline_s=30, what="the prefill worker")
        kept = shared.read()
        controller._channel.supersede()
    assert kept is not None
    assert [m.state for m in kept.members] == ["running", "running", "pending"]
    assert attached["prefill"] == "expected"
    assert [host.host_id for host in kept.hosts] == ["a", "back", "expected"]


def test_a_redis_that_lost_all_gets_the_state_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next head, on another host, would start with the sizes of the first start."""
    monkeypatch.setattr(PoolController, "_attach", lambda *_: None)
    monkeypatch.setattr(controller_module.HostWatch, "update", lambda _: None)
    folder = tmp_path / "run"
    folder.mkdir()
    spec = a_spec(folder, host_id="a", number=3)
    with EmbeddedRedis(tmp_path / "redis", cluster_id="c") as server:
        url = server.url_of("controller")
        monkeypatch.setenv(REDIS_URL_VARIABLE, url)
        next_head = SharedOwned(url, "c", 4)

        def wanted() -> dict[str, int]:
            found = next_head.read()
            return {} if found is None else dict(found.wanted)

        controller = PoolController(spec)
        controller.scale({"decode": 2})
        wait_for(lambda: wanted() == {"decode": 2}, deadline_s=30, what="the new size")
        with Redis.from_url(server.url) as redis:
            redis.flushall()
        wait_for(lambda: wanted() == {"decode": 2}, deadline_s=10, what="the size once more")
        controller._channel.supersede()


def test_the_controller_of_one_machine_does_not_import_ray(tmp_path: Path) -> None:
    program = f"""
import sys
from tandem.cluster.ray import controller
controller.ScaleChannel.start = lambda _: None
controller.ScaleChannel.publish = lambda *_: None
controller.PoolController(controller.ClusterSpec("c", {str(tmp_path)!r}, {{}}, {{}}, [], 1.0))
assert "ray" not in sys.modules
"""
    environment = {REDIS_URL_VARIABLE: "redis://127.0.0.1:1"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)
