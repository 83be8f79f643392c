"""The events of a pair whose blocks come over another transport than the best, with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tandem.common.perf_model.rates import PairRate
from tandem.net.store.registry import KvCompatibility, WorkerRecord
from tandem.router.workers.events import EventLog

RECORD = WorkerRecord(
    worker_id="decode-0",
    epoch="e",
    role="decode",
    state="ready",
    address="10.0.0.1:5000",
    metrics_address="",
    host="h",
    pid=1,
    model="m",
    max_model_len=100,
    compatibility=KvCompatibility("m", "float32", "invariant", 16, "float32", "l", 1),
)


def with_pair(transport: str, reason: str = "") -> WorkerRecord:
    pairs = {"prefill-0": PairRate(transport, 1e-3, 1e9, reason)}
    return msgspec.structs.replace(RECORD, pairs=pairs)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (RECORD, with_pair("nixl"), None),
        (
            RECORD,
            with_pair("grpc", "NIXL does not work: no memory"),
            "it reads blocks of prefill-0 over grpc: NIXL does not work: no memory",
        ),
        (
            with_pair("nixl"),
            with_pair("grpc", "3 NIXL reads failed in a row"),
            "it reads blocks of prefill-0 over grpc now, and did so over nixl before: "
            "3 NIXL reads failed in a row",
        ),
        (with_pair("grpc", "slow"), with_pair("grpc", "slower"), None),
        (
            with_pair("grpc", "slow"),
            with_pair("nixl"),
            "it reads blocks of prefill-0 over nixl now, and did so over grpc before",
        ),
    ],
)
def test_a_fallback_has_its_reason(
    before: WorkerRecord, now: WorkerRecord, told: str | None
) -> None:
    redis: Any = SimpleNamespace()
    log = EventLog(redis, "c")
    found: list[str] = []
    log.add = lambda kind, about, text, once="": found.append(text)  # type: ignore[method-assign]
    log.changed(before, now)
    assert found == ([told] if told else [])
