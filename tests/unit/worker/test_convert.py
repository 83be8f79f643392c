from __future__ import annotations

from msgspec.structs import replace

from tandem.common.perf_model.kv_load import GroupLoad
from tandem.net.store.registry import WorkerLoad
from tandem.router.workers.client import load_of
from tandem.worker.convert import load_message


def test_a_router_reads_the_load_that_a_worker_tells() -> None:
    load = WorkerLoad(num_running=3, blocks_total=150, blocks_used=95, num_running_slots=64, step=7)
    groups = (GroupLoad(100, 90), GroupLoad(50, 5, 4))
    for told in (load, replace(load, groups=groups)):
        assert load_of(load_message(told)) == told
