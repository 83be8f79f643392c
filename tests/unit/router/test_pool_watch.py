"""Pools on Kubernetes whose pods are there and whose workers are not."""

from __future__ import annotations

from typing import Any

from tandem.router.workers.pool_watch import PoolWatch
from tandem.router.workers.rows import WorkerRow

READY = WorkerRow("decode-0", "decode", "ready")
LOADS = WorkerRow("decode-1", "decode", "loading")
TOLD = "the decode pool has 1 of 2 workers ready; `kubectl get pods` shows what the others wait for"


def pools(ready: int, **more: Any) -> dict[str, dict[str, Any]]:
    return {"prefill": {"ready": 0}, "decode": {"ready": ready, "wanted": 2, "running": 2, **more}}


def test_a_pod_that_never_starts_is_a_problem_after_the_grace() -> None:
    watch = PoolWatch(grace_s=90)
    watch.note(pools(1), [READY], 1000.0)
    watch.note(pools(1), [READY], 1090.0)
    assert watch.problems == {}
    watch.note(pools(1), [READY], 1090.1)
    assert watch.problems == {"decode pool": TOLD}
    watch.note(pools(1), [READY, LOADS], 1100.0)
    assert watch.problems, "it is told until the worker is ready"
    watch.note({"prefill": {"ready": 0}, "decode": {"ready": 1}}, [READY], 1101.0)
    assert watch.problems, "Kubernetes does not tell, and the size that it told last stands"
    watch.note(pools(2), [READY, WorkerRow("decode-1", "decode", "ready")], 1102.0)
    assert watch.problems == {}
    assert (watch.sizes, watch.ready) == ({"decode": 2}, {"prefill": 0, "decode": 2})


def test_a_worker_that_has_a_row_is_told_by_its_row() -> None:
    watch = PoolWatch(grace_s=90)
    watch.note(pools(1), [READY], 1000.0)
    for second in (1050.0, 1500.0):
        watch.note(pools(1), [READY, LOADS], second)
        assert watch.problems == {}
    for second in (1600.0, 1691.0):  # the pod of a worker that is lost was never replaced
        watch.note(pools(1), [READY, WorkerRow("decode-1", "decode", "lost")], second)
    assert watch.problems == {"decode pool": TOLD}


def test_a_pool_with_agents_and_one_of_an_unknown_size_are_left_out() -> None:
    watch = PoolWatch(grace_s=0)
    for second in (1.0, 2.0):
        watch.note(pools(1, agents=[]), [READY], second)
        assert watch.problems == {}
    for second in (3.0, 4.0):  # Redis has lost what the controller wrote
        watch.note({"prefill": {"ready": 0}, "decode": {"ready": 1}}, [READY], second)
        assert watch.problems == {}
    watch = PoolWatch(grace_s=0)
    for second in (1.0, 2.0):
        watch.note({"prefill": {"ready": 0}, "decode": {"ready": 1}}, [READY], second)
        assert watch.problems == {}
    assert watch.sizes == {}


def test_what_kubernetes_told_is_beside_what_has_registered() -> None:
    watch = PoolWatch()
    watch.owned = {"decode": {"wanted": 2, "running": 2}, "router": {"wanted": 1, "running": 1}}
    states = watch.states([], None)
    assert states["decode"] == {
        "wanted": 2,
        "running": 2,
        "registered": 0,
        "ready": 0,
        "serving": 0,
    }
    assert states["router"] == {"wanted": 1, "running": 1}
    assert "wanted" not in states["prefill"]
