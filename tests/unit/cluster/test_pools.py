"""Pool sizes, names and cores, as the controller decides them."""

from __future__ import annotations

import msgspec

from tandem.cluster.pool_state import describe
from tandem.cluster.pools import (
    ClusterSpec,
    Host,
    Member,
    PoolCommand,
    lose,
    plan,
    revive,
)
from tandem.common.config.cluster import Pool

WANTED: dict[Pool, int] = {"router": 1, "prefill": 1, "decode": 1}


def make_spec(cores: list[int] | None = None) -> ClusterSpec:
    return ClusterSpec(
        cluster_id="c",
        run_folder="/nowhere",
        pools={
            "router": PoolCommand(["router", "{id}", "--port", "{port}"], ports={"port": 8000}),
            "prefill": PoolCommand(["worker", "{id}", "{cores}"], num_cores=1),
            "decode": PoolCommand(["worker", "{id}", "{cores}"], num_cores=1),
        },
        wanted=WANTED,
        cores=[0, 1] if cores is None else cores,
    )


def test_an_empty_cluster_gets_every_process_and_each_engine_a_core() -> None:
    add, drain = plan(make_spec(), WANTED, [])
    assert [(m.member_id, m.cores) for m in add] == [
        ("router-0", []),
        ("decode-0", [0]),
        ("prefill-0", [1]),
    ]
    assert drain == []


def test_the_plan_is_stable() -> None:
    add, _ = plan(make_spec(), WANTED, [])
    assert plan(make_spec(), WANTED, add) == ([], [])


def test_pools_take_turns_a_decode_worker_first() -> None:
    add, _ = plan(make_spec(), {"prefill": 2, "decode": 3, "router": 1}, [])
    first = ["router-0", "decode-0", "prefill-0"]
    assert [m.member_id for m in add] == [*first, "decode-1", "prefill-1", "decode-2"]


def test_more_engines_than_cores_share_them_evenly() -> None:
    wanted: dict[Pool, int] = {"prefill": 3, "decode": 2}
    add, _ = plan(make_spec(), wanted, [])
    cores = [m.cores for m in add]
    assert sorted(cores) in ([[0], [0], [0], [1], [1]], [[0], [0], [1], [1], [1]])


def test_an_engine_with_several_threads_gets_as_many_cores() -> None:
    spec = make_spec(cores=[0, 1, 2, 3])
    decode = msgspec.structs.replace(spec.pools["decode"], num_cores=2)
    spec = msgspec.structs.replace(spec, pools=spec.pools | {"decode": decode})
    add, _ = plan(spec, {"decode": 2, "prefill": 1}, [])
    assert [(m.pool, m.cores) for m in add] == [
        ("decode", [0, 1]),
        ("prefill", [2]),
        ("decode", [0, 3]),
    ]
    spec = msgspec.structs.replace(spec, cores=[0])
    add, _ = plan(spec, {"decode": 1}, [])
    assert [m.cores for m in add] == [[]]  # too few cores: the engine may use all of them


def test_cores_of_one_numa_node_are_preferred_to_those_of_two() -> None:
    spec = msgspec.structs.replace(make_spec(cores=[0, 1, 4, 5, 2, 3, 6, 7]), numa=[4, 4])
    decode = msgspec.structs.replace(spec.pools["decode"], num_cores=3)
    spec = msgspec.structs.replace(spec, pools=spec.pools | {"decode": decode})
    add, _ = plan(spec, {"decode": 3}, [])
    # In a node, the third one would share two cores. Elsewhere it shares one.
    assert [m.cores for m in add] == [[0, 1, 4], [2, 3, 6], [0, 5, 7]]
    decode = msgspec.structs.replace(decode, num_cores=6)
    spec = msgspec.structs.replace(spec, pools=spec.pools | {"decode": decode})
    add, _ = plan(spec, {"decode": 1}, [])
    assert [m.cores for m in add] == [[0, 1, 2, 3, 4, 5]]  # no node has so many


def test_without_cores_to_pin_to_nothing_is_pinned() -> None:
    add, _ = plan(make_spec(cores=[]), WANTED, [])
    assert all(m.cores == [] for m in add)


def test_scaling_down_drains_the_newest_first() -> None:
    members = [
        Member("prefill-1", "prefill", ordinal=3, state="running"),
        Member("prefill-0", "prefill", ordinal=7, state="running"),
        Member("prefill-2", "prefill", ordinal=5, state="running"),
    ]
    _, drain = plan(make_spec(), {"prefill": 1}, members)
    assert [m.member_id for m in drain] == ["prefill-0", "prefill-2"]


def test_one_that_leaves_does_not_count_and_its_name_is_not_reused() -> None:
    members = [Member("decode-0", "decode", ordinal=0, cores=[0], state="draining")]
    add, drain = plan(make_spec(), {"decode": 1}, members)
    assert [(m.member_id, m.ordinal, m.cores) for m in add] == [("decode-1", 1, [0])]
    assert drain == []


def test_a_freed_name_is_used_again_by_an_agent_of_another_name() -> None:
    before = Member("decode-0", "decode", ordinal=4)
    add, _ = plan(make_spec(), {"decode": 2}, [before])
    (again,), _ = plan(make_spec(), {"decode": 1}, [])
    assert [m.member_id for m in add] == ["decode-1"]
    assert again.member_id == "decode-0"
    assert again.keeper_name != before.keeper_name


def test_commands_are_filled_in_and_only_the_first_gets_the_public_ports() -> None:
    spec = make_spec()
    (first, second), _ = plan(spec, {"router": 2}, [])
    assert spec.pools["router"].filled(first) == ["router", "router-0", "--port", "8000"]
    assert spec.pools["router"].filled(second) == ["router", "router-1", "--port", "0"]
    worker = Member("decode-0", "decode", ordinal=0, cores=[1])
    assert spec.pools["decode"].filled(worker) == ["worker", "decode-0", "1"]


def test_the_spec_travels_as_json() -> None:
    spec = make_spec()
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ClusterSpec) == spec


def test_the_description_counts_what_runs() -> None:
    members = [
        Member("decode-0", "decode", ordinal=0, cores=[1], state="running", pid=5, num_starts=1),
        Member("decode-1", "decode", ordinal=1, state="draining"),
    ]
    decode = describe({"decode": 1}, members)["decode"]
    assert isinstance(decode, dict)
    assert (decode["wanted"], decode["running"]) == (1, 1)
    assert decode["agents"][0] == {
        "id": "decode-0",
        "state": "running",
        "pid": 5,
        "core": 1,
        "starts": 1,
        "last_line": "",
        "exit": "",
        "is_stopped": False,
        "since": 0.0,
    }


A, B, C = Host("a", [0, 1]), Host("b", [0, 1]), Host("c", [0, 1], {"gpu": "H100"})


def spread(host_id: str = "a", **selectors: dict[str, str]) -> ClusterSpec:
    return msgspec.structs.replace(make_spec(), host_id=host_id, selectors=selectors)


def places(members: list[Member]) -> list[tuple[str, str]]:
    return [(m.member_id, m.host) for m in members]


def test_members_go_where_the_fewest_of_their_pool_are() -> None:
    wanted: dict[Pool, int] = {"router": 2, "prefill": 2, "decode": 3}
    add, _ = plan(spread(), wanted, [], [A, B])
    assert places(add) == [
        ("router-0", "a"),
        ("decode-0", "b"),
        ("prefill-0", "a"),
        ("router-1", "b"),
        ("decode-1", "a"),
        ("prefill-1", "b"),
        ("decode-2", "a"),
    ]
    assert [m.member_id for m in add if m.has_ports] == ["router-0", "router-1"]
    # Cores are those of each host.
    assert [m.cores for m in add if m.pool != "router"] == [[0], [0], [1], [1], [0]]


def test_a_router_waits_for_a_host_without_one() -> None:
    add, _ = plan(spread(), {"router": 3}, [], [A, B])
    assert places(add) == [("router-0", "a"), ("router-1", "b")]
    more, _ = plan(spread(), {"router": 3}, add, [A, B, C])
    assert places(more) == [("router-2", "c")]


def test_a_pool_goes_only_where_its_labels_are() -> None:
    spec = spread(decode={"gpu": "H100"})
    assert plan(spec, {"decode": 1}, [], [A, B]) == ([], [])
    add, _ = plan(spec, {"decode": 2}, [], [A, B, C])
    assert places(add) == [("decode-0", "c"), ("decode-1", "c")]


def test_members_of_a_lost_host_are_placed_elsewhere_under_another_name() -> None:
    members, _ = plan(spread(), {"decode": 2}, [], [A, B])
    assert lose(members, set()) == []
    (lost,) = lose(members, {"b"})
    assert (lost.member_id, lost.state) == ("decode-1", "lost")
    assert lose([lost], {"b"}) == []
    add, drain = plan(spread(), {"decode": 2}, [members[0], lost], [A])
    assert (places(add), drain) == ([("decode-2", "a")], [])


def test_a_host_that_is_back_gets_new_agents_and_the_newest_members_leave() -> None:
    members, _ = plan(spread(), {"decode": 2}, [], [A, B])
    (lost,) = lose(members, {"b"})
    add, _ = plan(spread(), {"decode": 2}, [members[0], lost], [A])
    (back,) = revive([members[0], lost, *add], {"a", "b"})
    assert (back.member_id, back.host, back.state) == ("decode-1", "b", "pending")
    assert back.keeper_name != members[1].keeper_name
    _, drain = plan(spread(), {"decode": 2}, [members[0], back, *add], [A, B])
    assert [m.member_id for m in drain] == ["decode-2"]


def test_what_is_back_stays_and_its_substitute_leaves_once_it_runs() -> None:
    members, _ = plan(spread(), {"router": 2}, [], [A, B, C])
    (lost,) = lose(members, {"b"})
    left = [*running(members[:1]), lost]
    add, _ = plan(spread(), {"router": 2}, left, [A, C])
    assert places(add) == [("router-2", "c")]
    (back,) = revive([lost], {"b"})
    members = [left[0], back, *running(add)]
    assert plan(spread(), {"router": 2}, members, [A, B, C]) == ([], [])
    assert plan(spread(), {"router": 2}, running(members), [A, B, C])[1] == running(add)
    # Its process has ended with its host: the substitute is the one that runs.
    gone = msgspec.structs.replace(back, state="restarting")
    members = [left[0], gone, *running(add)]
    assert plan(spread(), {"router": 2}, members, [A, B, C])[1] == [gone]


def test_a_host_that_leaves_keeps_its_members_until_it_says_that_they_may_drain() -> None:
    members, _ = plan(spread(), {"decode": 2}, [], [A, B])
    add, drain = plan(spread(), {"decode": 2}, members, [A, B], {"b": "leaves"})
    assert (places(add), drain) == ([("decode-2", "a")], [])
    members = [*members, *add]
    assert plan(spread(), {"decode": 2}, members, [A, B], {"b": "leaves"}) == ([], [])
    add, drain = plan(spread(), {"decode": 2}, members, [A, B], {"b": "drains"})
    assert (add, places(drain)) == ([], [("decode-1", "b")])


def running(members: list[Member]) -> list[Member]:
    return [msgspec.structs.replace(m, state="running") for m in members]


def test_a_member_moves_to_a_host_that_joined_and_hands_over_first() -> None:
    members, _ = plan(spread(), {"decode": 3}, [], [A])
    assert plan(spread(), {"decode": 3}, members, [A, B]) == ([], [])  # until all of them run
    add, drain = plan(spread(), {"decode": 3}, running(members), [A, B])
    assert (places(add), drain) == ([("decode-3", "b")], [])
    members = [*running(members), *add]
    assert plan(spread(), {"decode": 3}, members, [A, B]) == ([], [])
    add, drain = plan(spread(), {"decode": 3}, running(members), [A, B])
    assert (add, places(drain)) == ([], [("decode-2", "a")])
    members = [m for m in running(members) if m not in running(drain)]
    assert plan(spread(), {"decode": 3}, members, [A, B]) == ([], [])


def test_nothing_moves_where_its_labels_are_missing_or_ports_are_taken() -> None:
    spec = spread(decode={"gpu": "H100"})
    members, _ = plan(spec, {"decode": 2, "router": 1}, [], [C])
    assert plan(spec, {"decode": 2, "router": 1}, running(members), [A, C]) == ([], [])


def test_a_pool_shrinks_where_most_of_it_is_and_by_what_does_not_run() -> None:
    members, _ = plan(spread(), {"decode": 3}, [], [A, B])
    _, drain = plan(spread(), {"decode": 2}, running(members), [A, B])
    assert places(drain) == [("decode-2", "a")]
    restarting = msgspec.structs.replace(members[0], state="restarting")
    _, drain = plan(spread(), {"decode": 1}, [restarting, running(members)[2]], [A])
    assert places(drain) == [("decode-0", "a")]
    _, drain = plan(spread(), {"decode": 0}, [restarting, running(members)[2]], [A])
    assert len(drain) == 2


def with_grpc(host_id: str = "") -> ClusterSpec:
    spec = make_spec()
    grpc = PoolCommand(["router", "{id}", "--grpc-port", "{grpc}"], ports={"grpc": 8001})
    return msgspec.structs.replace(spec, pools={**spec.pools, "grpc": grpc}, host_id=host_id)


def names(members: list[Member]) -> list[str]:
    return [m.member_id for m in members]


def test_one_machine_has_one_grpc_replica_however_many_routers() -> None:
    spec = with_grpc()
    add, _ = plan(spec, WANTED, [])
    assert names(add) == ["router-0", "decode-0", "prefill-0", "grpc-0"]
    assert spec.pools["grpc"].filled(add[-1]) == ["router", "grpc-0", "--grpc-port", "8001"]
    assert plan(spec, WANTED, add) == ([], [])
    more, drain = plan(spec, {**WANTED, "router": 3}, add)
    assert (names(more), drain) == (["router-1", "router-2"], [])
    pools = describe(WANTED, [*add, *more], spec.pools)
    assert list(pools) == ["router", "grpc", "prefill", "decode"]
    assert pools["grpc"]["replicas"] == 1  # type: ignore[index]
    assert "wanted" not in pools["grpc"]  # type: ignore[operator]  # nobody sets it


def test_each_host_with_a_router_has_a_grpc_replica() -> None:
    spec = with_grpc("a")
    hosts = [Host(name, [0]) for name in ("a", "b", "c")]
    add, _ = plan(spec, {"router": 2}, [], hosts)
    routed = {m.host for m in add if m.pool == "router"}
    assert len(routed) == 2
    assert {m.host for m in add if m.pool == "grpc"} == routed
    members = [msgspec.structs.replace(m, state="running") for m in add]
    _, drain = plan(spec, {"router": 1}, members, hosts)
    assert names(drain) == ["router-1", "grpc-1"]
    # Its port is free only when the process that drains has ended.
    leaving = [msgspec.structs.replace(m, state="draining") if m in drain else m for m in members]
    more, _ = plan(spec, {"router": 2}, leaving, hosts[:2])
    assert names(more) == []
    more, _ = plan(spec, {"router": 2}, leaving, hosts)
    assert [(m.pool, m.host) for m in more] == [("router", "c"), ("grpc", "c")]


def test_a_lost_hosts_grpc_replica_is_lost_and_comes_back_with_it() -> None:
    spec = with_grpc("a")
    hosts = [Host("a", [0]), Host("b", [0])]
    add, _ = plan(spec, {"router": 1}, [], hosts)
    members = [msgspec.structs.replace(m, state="running") for m in add]
    (host,) = {m.host for m in members}
    lost = lose(members, [host])
    more, drain = plan(spec, {"router": 1}, lost, [h for h in hosts if h.host_id != host])
    assert (names(more), drain) == (["router-1", "grpc-1"], [])
    back = [
        *revive(lost, [host]),
        *(msgspec.structs.replace(m, state="running") for m in more),
    ]
    add, drain = plan(spec, {"router": 1}, back, hosts)
    assert add == []
    assert {m.host for m in drain} <= {host}


def test_a_leaving_host_keeps_its_grpc_replica_until_it_drains() -> None:
    spec = with_grpc("a")
    hosts = [Host("a", [0]), Host("b", [0])]
    add, _ = plan(spec, {"router": 1}, [], hosts[:1])
    members = [msgspec.structs.replace(m, state="running") for m in add]
    more, drain = plan(spec, {"router": 1}, members, hosts, {"a": "leaves"})
    assert ([(m.pool, m.host) for m in more], drain) == ([("router", "b"), ("grpc", "b")], [])
    members += [msgspec.structs.replace(m, state="running") for m in more]
    more, drain = plan(spec, {"router": 1}, members, hosts, {"a": "drains"})
    assert (more, names(drain)) == ([], ["router-0", "grpc-0"])


def test_without_a_grpc_command_there_is_no_replica() -> None:
    add, _ = plan(make_spec(), WANTED, [])
    assert "grpc" not in {m.pool for m in add}
    assert "grpc" not in describe(WANTED, add, make_spec().pools)
