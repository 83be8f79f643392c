"""Makes workers as placement sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tandem.common.worker_load import WorkerLoad
from tandem.router.placement.costs import (
    Work,
    WorkerSnapshot,
    price_decode,
    price_prefill,
)


def snapshot(worker_id: str, role: str = "decode", **fields: Any) -> WorkerSnapshot:
    """`fields` are fields of the snapshot and of its load."""
    load = WorkerLoad(
        **{name: fields.pop(name) for name in WorkerLoad.__struct_fields__ if name in fields}
    )
    values = {"epoch": f"{worker_id}/1", "address": f"{worker_id}:1", "state": "ready", **fields}
    return WorkerSnapshot(worker_id=worker_id, role=role, load=load, **values)


def with_load(worker: WorkerSnapshot, **changes: Any) -> WorkerSnapshot:
    """Returns the worker with these fields of its load."""
    return replace(worker, load=msgspec.structs.replace(worker.load, **changes))


def decode_cost(
    work: Work,
    worker: WorkerSnapshot,
    matches: Mapping[str, int],
    *,
    producers: Sequence[WorkerSnapshot],
) -> float:
    names = [producer.worker_id for producer in producers]
    return price_decode(work, worker, matches, producers=names).cost_s


def prefill_cost(
    work: Work,
    worker: WorkerSnapshot,
    matches: Mapping[str, int],
    *,
    held: Mapping[str, int] | None = None,
) -> float:
    others = [(name, num_tokens, 0.0) for name, num_tokens in (held or {}).items()]
    return price_prefill(work, worker, matches, held=others).cost_s
