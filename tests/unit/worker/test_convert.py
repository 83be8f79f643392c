from __future__ import annotations

from tandem.common.retention import NO_RETENTION, Retention
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.convert import retention_of


def test_an_old_router_asks_for_no_priority() -> None:
    assert retention_of(pb.SequenceInput()) == NO_RETENTION
    asked = pb.Retention(returns=True, pin_s=9.0, weight=7)
    assert retention_of(pb.SequenceInput(retention=asked)) == Retention(True, 9.0, 7)
    for priority in (0, 100):
        sent = pb.Retention(weight=100, priority=priority)
        assert retention_of(pb.SequenceInput(retention=sent)) == Retention(priority=priority)
