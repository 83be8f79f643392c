"""Members fit into Ray's nodes, leave some of them idle, and more nodes are asked for."""

from __future__ import annotations

from tandem.cluster.pool_state import describe
from tandem.cluster.pools import (
    ClusterSpec,
    Host,
    Member,
    MemberState,
    PoolCommand,
    node_bundles,
    plan,
)
from tandem.common.config.cluster import Pool

SEAT = {"decode": 1.0}


def make_spec(**decode: float) -> ClusterSpec:
    return ClusterSpec(
        cluster_id="c",
        run_folder="/nowhere",
        pools={
            "prefill": PoolCommand(["worker"]),
            "decode": PoolCommand(["worker"], resources=decode),
        },
        wanted={},
        cores=[],
        host_id="head",
        number=1,
        selectors={"prefill": {"gpu": "H100"}},
        on_nodes=True,
        requests_nodes=True,
    )


def host(name: str, resources: dict[str, float], **labels: str) -> Host:
    return Host(name, [], labels, resources)


def decode(number: int, on: str, state: MemberState = "running") -> Member:
    return Member(f"decode-{number}", "decode", ordinal=number, state=state, host=on)


def test_a_pool_is_as_large_as_its_nodes_have_room_for() -> None:
    hosts = [host("head", {}), host("a", SEAT), host("b", {"decode": 1, "prefill": 4})]
    add, drain = plan(make_spec(), {"decode": 3, "prefill": 1}, [], hosts)
    assert [(m.pool, m.host) for m in add] == [("decode", "a"), ("decode", "b")]
    assert drain == []


def test_a_member_that_drains_still_has_its_seat_and_a_lost_one_has_none() -> None:
    hosts = [host("a", SEAT), host("b", SEAT)]
    members = [decode(0, "a", "draining"), decode(1, "b", "lost")]
    add, _ = plan(make_spec(), {"decode": 2}, members, hosts)
    assert [m.host for m in add] == ["b"]


def test_gpus_and_cpus_are_shared_out_and_labels_matched() -> None:
    spec = make_spec(GPU=1, CPU=4)
    hosts = [host("a", {"GPU": 2, "CPU": 6}), host("b", {"GPU": 4, "CPU": 8, "prefill": 1})]
    add, _ = plan(spec, {"decode": 4, "prefill": 1}, [], hosts)
    assert [m.host for m in add] == ["a", "b", "b"]
    hosts[1] = host("b", {"GPU": 4, "CPU": 8, "prefill": 1}, gpu="H100")
    add, _ = plan(spec, {"prefill": 1}, [], hosts)
    assert [m.host for m in add] == ["b"]


def test_members_share_nodes_and_none_moves_to_an_idle_one() -> None:
    two = {"decode": 2.0}
    hosts = [host("a", two), host("b", two), host("c", two)]
    members = [decode(0, "b")]
    add, _ = plan(make_spec(), {"decode": 2}, members, hosts)
    assert [m.host for m in add] == ["b"]
    assert plan(make_spec(), {"decode": 2}, [decode(0, "b"), decode(1, "b")], hosts) == ([], [])


def test_the_node_with_the_fewest_members_becomes_idle() -> None:
    hosts = [host("a", {"decode": 2.0}), host("b", SEAT)]
    members = [decode(0, "b"), decode(1, "a"), decode(2, "a")]
    _, drain = plan(make_spec(), {"decode": 2}, members, hosts)
    assert drain == members[:1]
    members[2] = decode(2, "a", "restarting")
    _, drain = plan(make_spec(), {"decode": 2}, members, hosts)
    assert drain == members[2:]


def test_nodes_are_asked_for_until_every_process_is_on_one() -> None:
    spec = make_spec(GPU=1)
    sizes: dict[Pool, int] = {"prefill": 1, "decode": 2}
    gpu: tuple[dict[str, float], dict[str, str]] = ({"GPU": 1}, {})
    every = [({"prefill": 1.0}, {"gpu": "H100"}), gpu, gpu]
    prefill = Member("prefill-0", "prefill", ordinal=9, state="running", host="a")
    assert node_bundles(spec, sizes, []) == every
    assert node_bundles(spec, sizes, [prefill, decode(0, "a"), decode(1, "b", "pending")]) == every
    placed = [prefill, decode(0, "a"), decode(1, "b")]
    assert node_bundles(spec, sizes, placed) == []
    assert node_bundles(spec, {"decode": 1}, [prefill, *placed]) == []
    lost = [prefill, decode(0, "a"), decode(1, "b", "lost")]
    assert node_bundles(spec, sizes, lost) == every


def test_only_pools_of_the_spec_are_told() -> None:
    assert set(describe({"decode": 1}, [], make_spec().pools)) == {"prefill", "decode"}
