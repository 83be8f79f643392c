"""What a replica of a shard does with scans and entries of the log, without Redis."""

from __future__ import annotations

import pytest

from tandem.prefix_index.shard_replica import (
    OLD_S,
    Generations,
    LogBroken,
    Scan,
    ScannedWorker,
    ShardReplica,
)
from tests.chains import chain

BLOCKS = chain("a", 8)


class Log:
    """The log of one shard."""

    def __init__(self, shard: ShardReplica) -> None:
        self._shard = shard
        self._number = 0
        self._last = b""
        shard.begin_load(self.scan(), now=0.0)
        shard.check(self.scan())

    def scan(self, *workers: ScannedWorker, origin: bytes | None = None) -> Scan:
        if origin is None:
            origin = b"1-0" if self._number else b""
        return Scan(65536, 0, origin, self._last, False, workers, ())

    def append(self, kind: str, worker_id: str, now: float = 0.0, **fields: object) -> None:
        self._number += 1
        entry = {b"kind": kind.encode(), b"worker": worker_id.encode(), b"after": self._last}
        entry |= {
            name.encode(): value if isinstance(value, bytes) else str(value).encode()
            for name, value in fields.items()
        }
        self._last = b"%d-0" % self._number
        self._shard.apply(self._last, entry, now)

    def reset(self, worker_id: str, epoch: str, now: float = 0.0) -> None:
        self.append("reset", worker_id, now, epoch=epoch)

    def blocks(self, worker_id: str, epoch: str, depth: int, *, complete: bool = False) -> None:
        stored = b"".join(BLOCKS[:depth])
        self.append(
            "blocks", worker_id, epoch=epoch, stored=stored, removed=b"", complete=int(complete)
        )


def depths(*shards: ShardReplica) -> list[dict[str, int]]:
    return [shard.match(BLOCKS, closed=True) for shard in shards]


def test_an_entry_that_does_not_follow_changes_nothing() -> None:
    shard = ShardReplica({})
    log = Log(shard)
    log.reset("w", "p:1")
    log.blocks("w", "p:1", 3)
    entry = {b"kind": b"drop", b"worker": b"w"}
    for after in (b"", b"1-0", b"3-0", b"lost"):
        with pytest.raises(LogBroken):
            shard.apply(b"4-0", entry | {b"after": after}, 0.0)
    assert depths(shard) == [{"w": 3}]
    assert shard.position == b"2-0"


@pytest.mark.parametrize("process", ["p", "q"])
def test_a_log_in_another_shard_supersedes_that_of_a_worker(process: str) -> None:
    generations: Generations = {}
    first, second = ShardReplica(generations), ShardReplica(generations)
    logs = Log(first), Log(second)
    logs[1].reset("w", "p:1")
    logs[1].blocks("w", "p:1", 5, complete=True)
    logs[0].reset("w", f"{process}:2")
    logs[0].blocks("w", f"{process}:2", 2)
    assert depths(first, second) == [{"w": 2}, {"w": 5} if process == "p" else {}]
    logs[0].blocks("w", f"{process}:2", 3, complete=True)
    assert depths(first, second) == [{"w": 3}, {}]


def test_workers_stay_in_use_if_the_tree_was_lost_but_not_if_it_dropped_them() -> None:
    for origin, expected in ((b"1-0", {}), (b"", {"w": 4})):
        shard = ShardReplica({})
        log = Log(shard)
        log.reset("w", "p:1")
        log.blocks("w", "p:1", 4)
        shard.begin_load(log.scan(origin=origin), now=10.0)
        shard.check(log.scan(origin=origin))
        assert depths(shard) == [expected]
        shard.expire(10.0 + OLD_S)
        assert depths(shard) == [{}]


def test_slots_suffice_for_any_number_of_loads_and_logs_without_a_sweep() -> None:
    shard = ShardReplica({})
    log = Log(shard)
    for number in range(31):
        log.reset(f"w{number}", "p:1")
        log.blocks(f"w{number}", "p:1", number % 8 + 1)
    expected = {f"w{number}": number % 8 + 1 for number in range(31)}
    for _ in range(3):
        workers = [
            ScannedWorker(slot, worker_id, "p:1", True, False, depth)
            for slot, (worker_id, depth) in enumerate(expected.items())
        ]
        shard.begin_load(log.scan(*workers), now=0.0)
        assert depths(shard) == [expected]
    for epoch in range(2, 6):
        for number in range(31):
            log.reset(f"w{number}", f"p:{epoch}")
            log.blocks(f"w{number}", f"p:{epoch}", 1)
    assert depths(shard)[0].keys() == expected.keys()
    for number in range(31):
        log.blocks(f"w{number}", "p:5", 2, complete=True)
    assert depths(shard) == [dict.fromkeys(expected, 2)]


def test_an_entry_of_an_unknown_log_changes_no_look_up() -> None:
    shard = ShardReplica({})
    log = Log(shard)
    log.blocks("w", "p:1", 3, complete=True)
    log.append("drop", "w")
    assert depths(shard) == [{}]
    assert shard.table.num_entries == 0
