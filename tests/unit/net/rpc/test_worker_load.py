"""A worker's load is the same in its message to routers and in its record."""

from __future__ import annotations

import msgspec
import pytest

from tandem.common.worker_load import GroupLoad, WorkerLoad
from tandem.net.rpc.convert import to_message, to_struct
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

NAMES = WorkerLoad.__struct_fields__
NUMBERS = {name: number for number, name in enumerate(NAMES, 1) if name != "groups"}
FULL = WorkerLoad(**NUMBERS | {"groups": (GroupLoad(100, 90), GroupLoad(50, 5, 4))})


@pytest.mark.parametrize("load", [WorkerLoad(), FULL], ids=["empty", "full"])
def test_every_field_is_in_the_message(load: WorkerLoad) -> None:
    sent = to_message(pb.WorkerLoad, load).SerializeToString()
    assert to_struct(WorkerLoad, pb.WorkerLoad.FromString(sent)) == load


def test_the_record_of_a_load_is_that_of_older_versions() -> None:
    """The names and their order are those that older workers write, and older routers read."""
    names = [
        *("num_running", "num_waiting", "queue_max", "queued_tokens", "queued_s"),
        *("blocks_total", "blocks_used", "blocks_cached", "blocks_quarantined"),
        *("num_leases", "num_pulls", "step", "tokens_wasted", "num_seats", "chunk_tokens"),
        *("groups", "num_prefilling", "num_lines"),
    ]
    groups = [
        {"blocks_total": 100, "blocks_used": 90, "sequence_blocks_max": 0},
        {"blocks_total": 50, "blocks_used": 5, "sequence_blocks_max": 4},
    ]
    written = msgspec.msgpack.encode(FULL)
    numbers = zip([name for name in names if name != "groups"], NUMBERS.values(), strict=True)
    assert msgspec.msgpack.decode(written) == dict(numbers) | {"groups": groups}
    assert list(msgspec.msgpack.decode(written)) == names
    assert msgspec.msgpack.decode(written, type=WorkerLoad) == FULL
