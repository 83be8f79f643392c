"""Pool sizes, names and cores, as the controller decides them."""

from __future__ import annotations

import msgspec

from tandem.cluster.pools import (
    ClusterSpec,
    Member,
    PoolCommand,
    describe,
    plan,
)
from tandem.config.cluster import Pool

WANTED: dict[Pool, int] = {"router": 1, "prefill": 1, "decode": 1}


def make_spec(cores: list[int] | None = None) -> ClusterSpec:
    return ClusterSpec(
        cluster_id="c",
        run_folder="/nowhere",
        pools={
            "router": PoolCommand(["router", "{id}", "--port", "{port}"], ports={"port": 8000}),
            "prefill": PoolCommand(["worker", "{id}", "{core}"], pinned=True),
            "decode": PoolCommand(["worker", "{id}", "{core}"], pinned=True),
        },
        wanted=WANTED,
        cores=[0, 1] if cores is None else cores,
    )


def test_an_empty_cluster_gets_every_process_and_each_engine_a_core() -> None:
    add, drain = plan(make_spec(), WANTED, [])
    assert [(m.member_id, m.core) for m in add] == [
        ("router-0", None),
        ("prefill-0", 0),
        ("decode-0", 1),
    ]
    assert drain == []


def test_the_plan_is_stable() -> None:
    add, _ = plan(make_spec(), WANTED, [])
    assert plan(make_spec(), WANTED, add) == ([], [])


def test_more_engines_than_cores_share_them_evenly() -> None:
    wanted: dict[Pool, int] = {"prefill": 3, "decode": 2}
    add, _ = plan(make_spec(), wanted, [])
    cores = [m.core for m in add]
    assert sorted(cores) == [0, 0, 0, 1, 1] or sorted(cores) == [0, 0, 1, 1, 1]


def test_without_cores_to_pin_to_nothing_is_pinned() -> None:
    add, _ = plan(make_spec(cores=[]), WANTED, [])
    assert {m.core for m in add} == {None}


def test_scaling_down_drains_the_newest_first() -> None:
    members = [
        Member("prefill-1", "prefill", ordinal=3, state="running"),
        Member("prefill-0", "prefill", ordinal=7, state="running"),
        Member("prefill-2", "prefill", ordinal=5, state="running"),
    ]
    _, drain = plan(make_spec(), {"prefill": 1}, members)
    assert [m.member_id for m in drain] == ["prefill-0", "prefill-2"]


def test_one_that_leaves_does_not_count_and_its_name_is_not_reused() -> None:
    members = [Member("decode-0", "decode", ordinal=0, core=0, state="draining")]
    add, drain = plan(make_spec(), {"decode": 1}, members)
    assert [(m.member_id, m.ordinal, m.core) for m in add] == [("decode-1", 1, 0)]
    assert drain == []


def test_a_freed_name_is_used_again_by_an_agent_of_another_name() -> None:
    before = Member("decode-0", "decode", ordinal=4)
    add, _ = plan(make_spec(), {"decode": 2}, [before])
    (again,), _ = plan(make_spec(), {"decode": 1}, [])
    assert [m.member_id for m in add] == ["decode-1"]
    assert again.member_id == "decode-0"
    assert again.agent_name != before.agent_name


def test_commands_are_filled_in_and_only_the_first_gets_the_public_ports() -> None:
    spec = make_spec()
    first, second = (Member(f"router-{n}", "router", ordinal=n) for n in range(2))
    assert spec.pools["router"].filled(first) == ["router", "router-0", "--port", "8000"]
    assert spec.pools["router"].filled(second) == ["router", "router-1", "--port", "0"]
    worker = Member("decode-0", "decode", ordinal=0, core=1)
    assert spec.pools["decode"].filled(worker) == ["worker", "decode-0", "1"]


def test_the_spec_travels_as_json() -> None:
    spec = make_spec()
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ClusterSpec) == spec


def test_the_description_counts_what_runs() -> None:
    members = [
        Member("decode-0", "decode", ordinal=0, core=1, state="running", pid=5, num_starts=1),
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
        "since": 0.0,
    }
