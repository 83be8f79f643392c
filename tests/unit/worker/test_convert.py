from __future__ import annotations

from msgspec.structs import replace

from tandem.common.perf_model.kv_load import GroupLoad
from tandem.common.retention import NO_RETENTION, Retention
from tandem.net.rpc.convert import retention_of
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.registry import WorkerLoad
from tandem.router.workers.client import load_of
from tandem.worker.convert import load_message


def test_a_router_reads_the_load_that_a_worker_tells() -> None:
    load = WorkerLoad(num_running=3, blocks_total=150, blocks_used=95, num_running_slots=64, step=7)
    groups = (GroupLoad(100, 90), GroupLoad(50, 5, 4))
    for told in (load, replace(load, groups=groups)):
        assert load_of(load_message(told)) == told


def test_an_old_router_asks_for_no_priority() -> None:
    assert retention_of(pb.SequenceInput()) == NO_RETENTION
    asked = pb.Retention(returns=True, pin_s=9.0, weight=7)
    assert retention_of(pb.SequenceInput(retention=asked)) == Retention(True, 9.0, 7)
    for priority in (0, 100):
        sent = pb.Retention(weight=100, priority=priority)
        assert retention_of(pb.SequenceInput(retention=sent)) == Retention(priority=priority)
