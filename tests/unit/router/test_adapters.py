"""Placement by adapters, and which adapters a router serves."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tandem.common.adapter import Adapter
from tandem.net.store.registry import AdapterState, KvCompatibility
from tandem.router.placement.choose import Work, WorkerSnapshot, choose
from tests.unit.router.snapshots import prefill_cost, snapshot, with_load

ADAPTER = Adapter("sql", "digest", "/adapters/sql", 16)
COMPATIBILITY = KvCompatibility("model", "float32", "fast", 16, "float32", "layout", 1)


def worker(name: str, *, role: str = "decode", **fields: Any) -> WorkerSnapshot:
    fields.setdefault("lora_rank_max", 64)
    return snapshot(name, role, blocks_total=100, **fields)


def chosen(*workers: WorkerSnapshot, adapter: Adapter | None = ADAPTER) -> set[str]:
    """Returns the decode workers that are chosen of these, over many draws."""
    found = set()
    for seed in range(20):
        placement = choose(Work(100, 16, adapter), workers, {}, Random(seed))
        if placement is not None:
            found.add(placement.decode.worker_id)
    return found


def test_a_worker_that_has_the_adapter_goes_first() -> None:
    has = worker("has", adapters=frozenset({"digest"}))
    lacks = worker("lacks", adapters=frozenset({"another"}))
    assert chosen(has, lacks) == {"has"}
    assert chosen(has, lacks, adapter=None) == {"has", "lacks"}
    assert chosen(lacks) == {"lacks"}  # it can load it


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_rank_max": 0},
        {"lora_rank_max": 8},
        {"adapters_failed": frozenset({"digest"})},
    ],
    ids=repr,
)
def test_a_worker_that_cannot_load_it_is_not_chosen(fields: dict[str, Any]) -> None:
    assert chosen(worker("cannot", **fields)) == set()
    assert chosen(worker("cannot", **fields), worker("can")) == {"can"}
    assert chosen(worker("cannot", **fields), adapter=None) == {"cannot"}
    many = [worker(f"cannot-{i}", **fields) for i in range(40)]
    assert chosen(*many, worker("can")) == {"can"}
    has = worker("has", **fields | {"adapters": frozenset({"digest"})})
    assert chosen(has) == {"has"}


def test_only_prefill_workers_that_can_load_it_are_candidates() -> None:
    decode = worker("decode", adapters=frozenset({"digest"}))
    can = worker("can", role="prefill")
    cannot = worker("cannot", role="prefill", lora_rank_max=8)
    for workers, names in (((can, cannot), ["can"]), ((cannot,), [])):
        placement = choose(Work(100, 16, ADAPTER), (decode, *workers), {}, Random(1))
        assert placement is not None
        assert [w.worker_id for w in placement.prefill_candidates] == names


def first_prefill(adapter: Adapter | None, *workers: WorkerSnapshot) -> set[str]:
    """Returns the prefill workers that come first among these, over many draws."""
    decode = worker("decode")
    found = set()
    for seed in range(20):
        placement = choose(Work(100, 16, adapter), (decode, *workers), {}, Random(seed))
        assert placement is not None
        names = [w.worker_id for w in placement.prefill_candidates]
        assert set(names) == {w.worker_id for w in workers}
        found.add(names[0])
    return found


def test_a_prefill_worker_that_has_the_adapter_goes_first() -> None:
    has = worker("has", role="prefill", adapters=frozenset({"digest"}))
    lacks = worker("lacks", role="prefill", adapters=frozenset({"another"}))
    assert first_prefill(ADAPTER, lacks, has) == {"has"}
    assert first_prefill(None, lacks, has) == {"has", "lacks"}
    assert first_prefill(Adapter("new", "new", "/new", 16), lacks, has) == {"has", "lacks"}
    # Reading a file is soon done: it is not worth a long queue.
    busy = with_load(has, queued_tokens=100_000)
    assert first_prefill(ADAPTER, lacks, busy) == {"lacks"}
    work = Work(100, 16, ADAPTER)
    assert prefill_cost(work, lacks, {}) - prefill_cost(work, has, {}) == pytest.approx(0.05)


def test_the_root_of_hashes_takes_the_digest_and_not_the_name() -> None:
    base = COMPATIBILITY.chain_root(b"salt")
    assert COMPATIBILITY.chain_root(b"salt", "digest") != base
    assert COMPATIBILITY.chain_root(b"salt", "digest") != COMPATIBILITY.chain_root(b"salt", "other")
    assert COMPATIBILITY.chain(b"salt", "digest").root == COMPATIBILITY.chain_root(
        b"salt", "digest"
    )


def test_a_record_without_adapters_loads_none() -> None:
    assert AdapterState().rank_max == 0
