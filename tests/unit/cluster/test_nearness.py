"""A new worker goes near its peers where as many of its pool are, and nowhere else for that."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.nearness import (
    FAR_TIMES,
    bandwidths_to,
    far_hosts,
    far_reason,
    host_bandwidths,
)
from tandem.cluster.pool_state import describe
from tandem.cluster.pools import ClusterSpec, Host, Member, PoolCommand, plan
from tandem.common.config.cluster import Pool

FAST, SLOW = 8e8, 9e6
HOSTS = ["a", "b", "c", "d"]


def make_spec(*, on_nodes: bool = False, **selectors: dict[str, str]) -> ClusterSpec:
    return ClusterSpec(
        cluster_id="c",
        run_folder="/nowhere",
        pools={
            "router": PoolCommand(["router"], ports={"port": 8000}),
            "prefill": PoolCommand(["worker"]),
            "decode": PoolCommand(["worker"]),
        },
        wanted={},
        cores=[],
        host_id="a",
        selectors=selectors,  # type: ignore[arg-type]
        on_nodes=on_nodes,
    )


def running(*placed: tuple[str, str]) -> list[Member]:
    """Makes members from (id, host)."""
    return [
        Member(name, name.split("-")[0], ordinal=at, state="running", host=host)  # type: ignore[arg-type]
        for at, (name, host) in enumerate(placed)
    ]


def measured(**bandwidths: float) -> dict[str, dict[str, float]]:
    """Makes what decode-0 measured, from prefill_0=..., ...; the peers have records, too."""
    peers = {name.replace("_", "-"): value for name, value in bandwidths.items()}
    return {"decode-0": peers, **{peer: {} for peer in peers}}


def test_two_hosts_have_the_median_of_what_their_workers_measured_either_way() -> None:
    pairs = {"d": {"p": 1.0, "q": 5.0}, "p": {"d": 2.0, "q": 7.0, "gone": 9.0}, "gone": {"d": 9.0}}
    between = host_bandwidths(pairs, {"d": "a", "p": "b", "q": "b"})
    assert between == {("a", "b"): 2.0, ("b", "b"): 7.0}


def test_a_host_has_the_bandwidth_of_equal_shares_from_all_its_peers() -> None:
    between = {("a", "a"): 4.0, ("a", "b"): 1.0, ("b", "b"): 4.0, ("a", "c"): 1.0}
    # c has not measured b: nothing compares with what the others have.
    assert bandwidths_to(["a", "b"], HOSTS, between) == pytest.approx({"a": 1.6, "b": 1.6})
    assert bandwidths_to(["a"], HOSTS, between) == {"a": 4.0, "b": 1.0, "c": 1.0}
    assert bandwidths_to([], HOSTS, between) == {}


def test_only_hosts_that_are_much_slower_are_far() -> None:
    assert far_hosts({"a": 1.0, "b": FAR_TIMES, "c": 0.9, "d": 0.4}) == ["d", "c"]
    assert far_hosts({"a": 1.0}) == far_hosts({}) == []


def test_the_reason_names_the_farthest_hosts() -> None:
    found = {"a": 812e6, **{name: at * 1e6 for at, name in enumerate("bcdef", 1)}}
    assert far_reason(far_hosts(found), found, "decode") == (
        "b has 1.0 MB/s, c has 2.0 MB/s, d has 3.0 MB/s to the decode workers (2 more "
        "hosts are also slow); the fastest host has 812.0 MB/s"
    )


def test_a_worker_goes_to_the_near_host_and_says_from_which_it_was_kept() -> None:
    hosts = [Host(name, []) for name in ("a", "b")]
    members = running(("decode-0", "a"), ("prefill-0", "b"), ("prefill-1", "a"))
    wanted: dict[Pool, int] = {"prefill": 3, "decode": 1}
    (far,), _ = plan(make_spec(), wanted, members, hosts)
    assert (far.host, far.placed_why) == ("b", ""), "without measurements it is the emptier one"
    found = measured(prefill_0=SLOW, prefill_1=FAST)
    (near,), drain = plan(make_spec(), wanted, members, hosts, measured=found)
    assert near.host == "a"
    assert (
        near.placed_why == "b has 9.0 MB/s to the decode workers; the fastest host has 800.0 MB/s"
    )
    assert drain == []
    prefill = describe(wanted, [near])["prefill"]
    assert isinstance(prefill, dict)
    assert prefill["agents"][0]["placed_why"] == near.placed_why
    # Nothing moves back: as many of the pool are where they are as could be.
    assert plan(make_spec(), wanted, [*members, near], hosts, measured=found) == ([], [])


def test_a_pool_is_spread_before_it_is_near() -> None:
    hosts = [Host(name, []) for name in ("a", "b", "c")]
    members = running(("decode-0", "a"), ("prefill-0", "b"), ("prefill-1", "a"))
    found = measured(prefill_0=SLOW, prefill_1=FAST)
    add, _ = plan(make_spec(), {"prefill": 5, "decode": 1}, members, hosts, measured=found)
    assert [m.host for m in add] == ["c", "c", "a"], "c has measured nothing and is the emptiest"
    last, _ = plan(make_spec(), {"prefill": 6, "decode": 1}, [*members, *add], hosts)
    assert [m.host for m in last] == ["b"]


def test_a_host_that_has_not_measured_a_peer_is_as_before() -> None:
    hosts = [Host(name, []) for name in ("a", "b")]
    members = running(("decode-0", "a"), ("prefill-0", "b"), ("decode-1", "b"), ("prefill-1", "a"))
    found = {**measured(prefill_0=SLOW, prefill_1=FAST), "decode-1": {}}
    wanted: dict[Pool, int] = {"prefill": 3, "decode": 2}
    assert plan(make_spec(), wanted, members, hosts, measured=found) == plan(
        make_spec(), wanted, members, hosts
    )
    # One without a record, which still loads its model, does not count as a peer.
    del found["decode-1"]
    (add,), _ = plan(make_spec(), wanted, members, hosts, measured=found)
    assert add.placed_why


def test_on_nodes_of_ray_the_fullest_of_those_that_are_not_far_is_chosen() -> None:
    hosts = [Host(name, [], {}, {"prefill": 4.0, "decode": 4.0}) for name in ("a", "b")]
    members = running(("decode-0", "a"), ("prefill-0", "b"), ("prefill-1", "b"), ("prefill-2", "a"))
    wanted: dict[Pool, int] = {"prefill": 4, "decode": 1}
    spec = make_spec(on_nodes=True)
    (most,), _ = plan(spec, wanted, [*members, *running(("decode-9", "b"))], hosts)
    assert most.host == "b"
    found = measured(prefill_0=SLOW, prefill_1=SLOW, prefill_2=FAST)
    (near,), _ = plan(spec, wanted, members, hosts, measured=found)
    assert near.host == "a"
    hosts[0] = Host("a", [], {}, {"prefill": 1.0, "decode": 4.0})
    (rest,), _ = plan(spec, wanted, members, hosts, measured=found)
    assert (rest.host, rest.placed_why) == ("b", ""), "the near node has no room"


worker_ids = st.sampled_from([f"{pool}-{n}" for pool in ("prefill", "decode") for n in range(4)])
pair_bandwidths = st.dictionaries(
    worker_ids, st.dictionaries(worker_ids, st.floats(1e3, 1e11), max_size=8), max_size=8
)
placed = st.dictionaries(worker_ids, st.sampled_from(HOSTS), max_size=8)
labelled = st.lists(st.sampled_from([{}, {"gpu": "H100"}]), min_size=1, max_size=4)
room = st.dictionaries(st.sampled_from(["prefill", "decode"]), st.floats(0, 3), max_size=2)


@given(placed, pair_bandwidths, labelled, st.integers(0, 6), st.integers(0, 6))
def test_nearness_changes_no_spread_no_labels_and_no_sizes(
    placed: dict[str, str],
    pairs: dict[str, dict[str, float]],
    labels: list[dict[str, str]],
    num_prefill: int,
    num_decode: int,
) -> None:
    hosts = [Host(name, [], of_host) for name, of_host in zip(HOSTS, labels, strict=False)]
    spec = make_spec(decode={"gpu": "H100"})
    wanted: dict[Pool, int] = {"prefill": num_prefill, "decode": num_decode}
    members = running(*placed.items())
    add, drain = plan(spec, wanted, members, hosts, measured=pairs)
    assert (add, drain) == plan(spec, wanted, members, hosts, measured=pairs)
    plain = plan(spec, wanted, members, hosts)
    assert plan(spec, wanted, members, hosts, measured={}) == plain
    assert [(m.member_id, m.pool) for m in add] == [(m.member_id, m.pool) for m in plain[0]]
    assert drain == plain[1]
    by_id = {host.host_id: host for host in hosts}
    for at, member in enumerate(add):
        fit = [h for h in hosts if member.pool == "prefill" or h.labels]
        assert by_id[member.host] in fit
        of_pool = Counter(m.host for m in [*members, *add[:at]] if m.pool == member.pool)
        assert of_pool[member.host] == min(of_pool[h.host_id] for h in fit)


@given(placed, pair_bandwidths, st.lists(room, min_size=1, max_size=4), st.integers(0, 6))
def test_nearness_never_takes_more_of_a_node_than_it_has(
    placed: dict[str, str],
    pairs: dict[str, dict[str, float]],
    resources: list[dict[str, float]],
    size: int,
) -> None:
    hosts = [Host(name, [], {}, free) for name, free in zip(HOSTS, resources, strict=False)]
    members = running(*placed.items())
    wanted: dict[Pool, int] = {"prefill": size, "decode": size}
    add, _ = plan(make_spec(on_nodes=True), wanted, members, hosts, measured=pairs)
    plain, _ = plan(make_spec(on_nodes=True), wanted, members, hosts)
    assert [m.pool for m in add] == [m.pool for m in plain]
    for host in hosts:
        for pool in {m.pool for m in add if m.host == host.host_id}:
            on_host = sum((m.pool, m.host) == (pool, host.host_id) for m in [*members, *add])
            assert on_host <= host.resources.get(pool, 0)


@given(st.dictionaries(st.sampled_from(HOSTS), st.floats(1e3, 1e11), min_size=1))
def test_the_fastest_host_is_never_far(bandwidths: dict[str, float]) -> None:
    far = far_hosts(bandwidths)
    assert max(bandwidths, key=lambda host_id: bandwidths[host_id]) not in far
    assert far_hosts(dict(reversed(bandwidths.items()))) == far


def test_the_reason_survives_the_file_of_the_controller() -> None:
    member = Member("prefill-0", "prefill", ordinal=0, host="a", placed_why="b has 9.0 MB/s")
    assert msgspec.json.decode(msgspec.json.encode(member), type=Member) == member
