"""A host has a number of GPUs, a worker gets some of them, and its process sees no other."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tandem.cluster.gpus import VISIBLE, count_gpus, with_gpus
from tandem.cluster.pool_state import describe, gpu_waits
from tandem.cluster.pools import ClusterSpec, Host, Member, PoolCommand, lose, plan, revive
from tandem.common.config.cluster import Pool


def machine(root: Path, *, files: int = 0, listed: int = 0) -> Path:
    """A machine with device files beside those of any driver, and with the driver's list."""
    (root / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(files))):
        (root / "dev" / name).touch()
    for n in range(listed):
        (root / "proc/driver/nvidia/gpus" / f"0000:{n:02x}:00.0").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("files", "listed", "num_gpus"), [(0, 0, 0), (8, 8, 8), (0, 8, 8), (2, 8, 2), (2, 0, 2)]
)
def test_gpus_are_counted_by_device_files_or_else_by_the_drivers_list(
    tmp_path: Path, files: int, listed: int, num_gpus: int
) -> None:
    assert count_gpus({}, machine(tmp_path, files=files, listed=listed)) == num_gpus


def test_a_machine_without_any_of_it_has_no_gpu(tmp_path: Path) -> None:
    assert count_gpus({}, tmp_path) == 0


@pytest.mark.parametrize(
    ("visible", "num_gpus"),
    [
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("3", 1),
        ("2, 0", 2),
        ("0,-1,1", 1),
        ("0,1,4,2", 2),
        ("GPU-5b1f,MIG-77aa", 2),
        ("MIG-GPU-5b1f/1/0", 1),
    ],
)
def test_what_the_host_may_see_is_counted_as_cuda_does(
    tmp_path: Path, visible: str, num_gpus: int
) -> None:
    assert count_gpus({VISIBLE: visible}, machine(tmp_path, files=4)) == num_gpus


def test_the_variable_alone_counts_where_nothing_else_is_found(tmp_path: Path) -> None:
    assert count_gpus({VISIBLE: "0,1,7"}, tmp_path) == 3


def test_a_worker_sees_one_gpu_of_those_that_its_host_sees() -> None:
    assert with_gpus({"A": "b"}, [2]) == {"A": "b", VISIBLE: "2"}
    assert with_gpus({"A": "b"}, [2, 3]) == {"A": "b", VISIBLE: "2,3"}
    assert with_gpus({VISIBLE: "6, 4,5"}, [1]) == {VISIBLE: "4"}
    assert with_gpus({VISIBLE: "6, 4,5"}, [0, 2]) == {VISIBLE: "6,5"}
    assert with_gpus({VISIBLE: "GPU-5b1f,MIG-77aa"}, [1]) == {VISIBLE: "MIG-77aa"}
    assert with_gpus({VISIBLE: "6,4"}, []) == {VISIBLE: "6,4"}
    assert with_gpus({}, []) == {}


def make_spec(
    device: str, limit: int | None, *, num_gpus: int = 0, host: str = "", ranks: int = 1
) -> ClusterSpec:
    command = {"command": ["worker"], "device": device, "num_gpus": ranks}
    worker = msgspec.convert(command, PoolCommand)
    return ClusterSpec(
        cluster_id="c",
        run_folder="/nowhere",
        pools={"router": PoolCommand(["router"]), "prefill": worker, "decode": worker},
        wanted={},
        cores=[0],
        host_id=host,
        num_gpus=num_gpus,
        workers_per_gpu=limit,
    )


def hosts(**num_gpus: int) -> list[Host]:
    return [Host(name, [0], num_gpus=number) for name, number in num_gpus.items()]


def running(members: list[Member]) -> list[Member]:
    return [msgspec.structs.replace(m, state="running") for m in members]


def gpu_of(member: Member) -> int | None:
    """The GPU of a worker that has at most one."""
    assert len(member.gpus) < 2
    return member.gpus[0] if member.gpus else None


def on(members: list[Member]) -> list[tuple[str, str, int | None]]:
    return [(m.member_id, m.host, gpu_of(m)) for m in members]


TWO: dict[Pool, int] = {"router": 1, "prefill": 2, "decode": 2}
DECODE: list[dict[Pool, int]] = [{"decode": size} for size in range(4)]


def test_eight_gpus_are_shared_out_and_a_router_takes_none() -> None:
    add, _ = plan(make_spec("cuda", 1, num_gpus=8), TWO, [])
    assert [gpu_of(m) for m in add] == [None, 0, 1, 2, 3]
    assert {gpu_of(m) for m in plan(make_spec("cpu", None, num_gpus=8), TWO, [])[0]} == {None}


def test_workers_that_may_share_take_free_gpus_first() -> None:
    add, _ = plan(make_spec("auto", None, num_gpus=3), TWO, [])
    assert [gpu_of(m) for m in add] == [None, 0, 1, 2, 0]
    add, _ = plan(make_spec("cuda", 2, num_gpus=1), TWO, [])
    assert [m.member_id for m in add] == ["router-0", "decode-0", "prefill-0"]
    assert [gpu_of(m) for m in add] == [None, 0, 0]


def test_each_rank_has_a_gpu_that_no_other_rank_or_worker_has() -> None:
    spec = make_spec("cuda", 1, num_gpus=8, ranks=2)
    add, _ = plan(spec, TWO, [])
    assert [m.gpus for m in add] == [[], [0, 1], [2, 3], [4, 5], [6, 7]]
    left = running([m for m in add if m.gpus not in ([0, 1], [4, 5])])
    one_more = [msgspec.structs.replace(left[1], member_id="decode-7", gpus=[1])]
    (again,), _ = plan(spec, {**TWO, "prefill": 1, "decode": 2}, [*left, *one_more])
    assert again.gpus == [0, 4], "the GPU 1 is in use"


def test_ranks_wait_for_a_host_with_as_many_free_gpus() -> None:
    spec = make_spec("cuda", 1, host="a", ranks=2)
    there = hosts(a=3, b=1)
    add, _ = plan(spec, DECODE[2], [], there)
    assert [(m.host, m.gpus) for m in add] == [("a", [0, 1])]
    why = "no host has 2 free GPUs (4 in total, --workers-per-gpu 1)"
    assert gpu_waits(spec, DECODE[2], running(add), there) == {"decode": why}
    few = hosts(a=1, b=1)
    assert gpu_waits(spec, DECODE[2], [], few)["decode"].startswith("no host has 2 GPUs (or")


def test_without_gpus_workers_go_where_they_went() -> None:
    for device in ("auto", "cuda"):
        add, _ = plan(make_spec(device, 1), TWO, [])
        assert [gpu_of(m) for m in add] == [None] * 5


def test_a_worker_that_drains_keeps_its_gpu_until_it_is_gone() -> None:
    spec = make_spec("cuda", 1, num_gpus=1)
    wanted = DECODE[1]
    (worker,), _ = plan(spec, wanted, [])
    drains = msgspec.structs.replace(worker, state="draining")
    assert plan(spec, wanted, [drains]) == ([], [])
    assert gpu_waits(spec, wanted, [drains], [spec.host]) != {}
    (again,), _ = plan(spec, wanted, [])
    assert again.gpus == [0]


def test_a_worker_goes_to_a_host_with_a_free_gpu_and_waits_for_one() -> None:
    spec = make_spec("cuda", 1, host="a")
    there = hosts(a=1, b=2, c=0)
    add, _ = plan(spec, TWO, [], there)
    assert on(add) == [
        ("router-0", "a", None),
        ("decode-0", "b", 0),
        ("prefill-0", "a", 0),
        ("decode-1", "b", 1),
    ]
    assert plan(spec, TWO, running(add), there) == ([], [])
    why = "no GPU is free (3 in total, --workers-per-gpu 1)"
    waits = gpu_waits(spec, TWO, running(add), there)
    assert waits == {"prefill": why}
    prefill = describe(TWO, add, waits=waits)["prefill"]
    assert isinstance(prefill, dict)
    assert (prefill["waits_why"], prefill["agents"][0]["gpus"]) == (why, [0])
    joined = [*there, *hosts(d=1)]
    more, _ = plan(spec, TWO, running(add), joined)
    assert on(more) == [("prefill-1", "d", 0)]
    assert gpu_waits(spec, TWO, [*add, *more], joined) == {}


def test_no_host_with_a_gpu_is_a_reason_of_its_own() -> None:
    spec = make_spec("cuda", 1, host="a")
    add, _ = plan(spec, TWO, [], hosts(a=0, b=0))
    assert on(add) == [("router-0", "a", None)]
    waits = gpu_waits(spec, TWO, add, hosts(a=0, b=0))
    assert {why[:20] for why in waits.values()} == {"no host has a GPU (o"}
    assert set(waits) == {"prefill", "decode"}


def test_auto_takes_hosts_without_gpus_only_if_no_host_has_one() -> None:
    spec = make_spec("auto", None, host="a")
    wanted = DECODE[3]
    assert {m.host for m in plan(spec, wanted, [], hosts(a=0, b=1))[0]} == {"b"}
    add, _ = plan(spec, wanted, [], hosts(a=0, b=0))
    assert on(add) == [("decode-0", "a", None), ("decode-1", "b", None), ("decode-2", "a", None)]
    # None moves from a GPU to a host without one.
    crowded, _ = plan(spec, wanted, [], hosts(b=1))
    assert plan(spec, wanted, running(crowded), hosts(a=0, b=1)) == ([], [])


def test_a_worker_moves_to_a_free_gpu_of_a_host_that_joined() -> None:
    spec = make_spec("cuda", 2, host="a")
    wanted = DECODE[2]
    members, _ = plan(spec, wanted, [], hosts(a=1))
    add, _ = plan(spec, wanted, running(members), hosts(a=1, b=1))
    assert on(add) == [("decode-2", "b", 0)]


def test_no_worker_moves_from_a_gpu_of_its_own_to_one_that_is_shared() -> None:
    spec = make_spec("auto", None, host="a")
    wanted: dict[Pool, int] = {"decode": 3, "prefill": 1}
    decode, _ = plan(spec, DECODE[3], [], hosts(a=3))
    prefill, _ = plan(spec, {"prefill": 1, "decode": 0}, [], hosts(b=1))
    members = running([*decode, *(msgspec.structs.replace(m, ordinal=9) for m in prefill)])
    assert {(m.host, gpu_of(m)) for m in members} == {("a", 0), ("a", 1), ("a", 2), ("b", 0)}
    assert plan(spec, wanted, members, hosts(a=3, b=1)) == ([], [])


def test_a_host_that_is_back_finds_its_gpu_taken_by_its_own_worker() -> None:
    spec = make_spec("cuda", 1, host="a")
    wanted = DECODE[2]
    members, _ = plan(spec, wanted, [], hosts(a=1, b=1))
    (lost,) = lose(running(members), {"b"})
    members = [running(members)[0], lost]
    assert plan(spec, wanted, members, hosts(a=1)) == ([], [])
    members = [members[0], *revive(members, {"a", "b"})]
    assert on(members) == [("decode-0", "a", 0), ("decode-1", "b", 0)]
    assert plan(spec, wanted, members, hosts(a=1, b=1)) == ([], [])


def test_labels_choose_before_gpus_do() -> None:
    spec = make_spec("cuda", 1, host="a")
    spec = msgspec.structs.replace(spec, selectors={"decode": {"zone": "z"}})
    there = [*hosts(a=4), Host("b", [0], {"zone": "z"}, num_gpus=1)]
    add, _ = plan(spec, DECODE[2], [], there)
    assert on(add) == [("decode-0", "b", 0)]
    assert "1 in total" in gpu_waits(spec, DECODE[2], add, there)["decode"]
