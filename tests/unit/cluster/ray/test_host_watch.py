"""Hosts that answer get members; those of a silent host go elsewhere after a while."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.cluster.pools import Host
from tandem.cluster.ray import host_watch
from tandem.cluster.ray.host_watch import FIRST_JOIN_S, LOST_AFTER_S, HostWatch
from tandem.cluster.ray.node import (
    CORES_LABEL,
    HOST_LABEL,
    NODE_LABEL,
    RayNode,
    read_cores,
    shown_cores,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(host_watch.time, "monotonic", lambda: now[0])
    return now


def node(host_id: str, *, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Labels": {HOST_LABEL: host_id, CORES_LABEL: "0-1_4-4"}}


def test_a_silent_host_is_lost_after_a_while(clock: list[float]) -> None:
    watch = HostWatch(Host("a", [0]))
    watch._take([node("a"), node("b")])
    assert set(watch.alive) == {"a", "b"}
    assert watch.alive["b"].cores == [0, 1, 4]
    watch._take([node("a"), node("b", alive=False)])
    assert set(watch.alive) == {"a"}
    assert not watch.is_lost("b")
    clock[0] += LOST_AFTER_S + 0.1
    assert watch.is_lost("b")
    assert not watch.is_lost("a")
    watch._take([node("a"), node("b", alive=False), node("b")])
    assert not watch.is_lost("b")


def test_a_fresh_head_waits_for_hosts_that_it_never_saw(clock: list[float]) -> None:
    watch = HostWatch(Host("a", [0]))
    clock[0] += FIRST_JOIN_S - 0.1
    assert not watch.is_lost("b")
    clock[0] += 0.2
    assert watch.is_lost("b")


def test_a_fresh_head_does_not_wait_for_the_one_before(clock: list[float]) -> None:
    watch = HostWatch(Host("a", [0]), "b")
    clock[0] += 0.1
    assert watch.is_lost("b")
    assert not watch.is_lost("c")
    watch._take([node("a"), node("b")])
    assert not watch.is_lost("b")


def test_members_are_placed_on_hosts_that_a_fresh_head_expects(clock: list[float]) -> None:
    expected = [Host("a", [7]), Host("b", [1], {"gpu": "H100"}), Host("c", [2])]
    watch = HostWatch(Host("a", [0]), "c", expected)
    clock[0] += 0.1
    assert watch.usable() == watch.known() == [Host("a", [0]), expected[1]]
    watch._take([node("a"), node("b")])
    assert [host.host_id for host in watch.usable()] == ["a", "b"]
    watch._take([node("a")])
    assert [host.host_id for host in watch.usable()] == ["a"], "it answered, and is silent now"
    assert [host.host_id for host in watch.known()] == ["a", "b"]
    clock[0] += LOST_AFTER_S + 0.1
    assert [host.host_id for host in watch.known()] == ["a"]
    never = HostWatch(Host("a", [0]), "", expected)
    clock[0] += FIRST_JOIN_S + 0.1
    assert [host.host_id for host in never.usable()] == ["a"], "the others did not join"


def test_without_an_own_host_each_node_of_ray_is_one(clock: list[float]) -> None:
    watch = HostWatch(None)
    assert watch.alive == {}
    labels = {NODE_LABEL: "n1", "gpu": "H100"}
    watch._take([node("a"), {"Alive": True, "Labels": labels, "Resources": {"decode": 2.0}}])
    assert watch.alive == {"n1": Host("n1", [], labels, {"decode": 2.0})}
    watch._take([])
    clock[0] += LOST_AFTER_S + 0.1
    assert watch.is_lost("n1")


def test_a_host_tells_its_gpus_beside_its_cores() -> None:
    watch = HostWatch(Host("a", [0]))
    node_b = RayNode(host_id="b", cores=[0, 2, 1, 3], numa=[2, 2], num_gpus=8)
    labels = node_b.node_labels
    watch._take([node("a"), {"Alive": True, "Labels": labels}])
    assert watch.alive["b"].cores_by_node == [[0, 2], [1, 3]]
    assert watch.alive["b"].num_gpus == 8
    # a host of another version tells neither
    assert (watch.alive["a"].cores_by_node, watch.alive["a"].num_gpus) == ([[0, 1, 4]], 0)


@pytest.mark.parametrize("num_nodes", [2, 8])
def test_all_cores_are_told_if_their_nodes_need_too_many_characters(num_nodes: int) -> None:
    by_node = [list(range(first, 64, num_nodes)) for first in range(num_nodes)]
    cores = [core for node in by_node for core in node]
    watch = HostWatch(Host("a", [0]))
    labels = RayNode(host_id="b", cores=cores, numa=[len(node) for node in by_node]).node_labels
    watch._take([node("a"), {"Alive": True, "Labels": labels}])
    assert watch.alive["b"].cores_by_node == [list(range(64))]


@pytest.mark.parametrize("cores", [[], [0], [0, 1, 2, 3], [0, 2, 3, 9]])
def test_cores_travel_as_a_label(cores: list[int]) -> None:
    assert read_cores(shown_cores(cores)) == cores


def test_a_label_of_many_cores_is_cut_and_not_wrong() -> None:
    cores = list(range(0, 400, 2))
    text = shown_cores(cores)
    assert len(text) <= 63
    assert read_cores(text) == cores[: len(read_cores(text))] != []
