"""Expired files and batches are deleted, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tandem.net.files.folder import FolderStore
from tandem.router.batches.files import Files
from tandem.router.batches.log import BatchLog
from tandem.router.batches.records import (
    BatchRecord,
    file_name,
    log_prefix,
    new_batch_id,
    open_name,
)
from tandem.router.batches.shelf import Batches
from tandem.router.batches.sweep import LEFT_S, SWEEP_S, Sweeper

HOUR_S = 3600.0


async def nothing() -> object:
    yield b"x"


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "files", "files-url")


async def test_a_sweep(store: FolderStore) -> None:
    files = Files(store, expire_s=HOUR_S, file_bytes_max=100, tenant_bytes_max=1000)
    batches = Batches(store)
    ids = []
    for expire_s in (HOUR_S, 10 * HOUR_S, HOUR_S):
        file_id, num_bytes = await files.receive("t", nothing())  # type: ignore[arg-type]
        await files.add(
            "t",
            file_id,
            filename="f",
            purpose="batch",
            num_bytes=num_bytes,
            expire_s=expire_s,
        )
        ids.append(file_id)
    left, _ = await files.receive("t", nothing())  # type: ignore[arg-type]
    now = time.time()
    made = []
    for file_id in (ids[2], ids[1]):
        record = BatchRecord(
            batch_id=new_batch_id(),
            tenant="t",
            endpoint="/v1/completions",
            input_file_id=file_id,
            completion_window="24h",
            created_at=now,
            window_ends_at=now + HOUR_S,
            expires_at=now + HOUR_S,
            output_expires_s=HOUR_S,
        )
        await batches.create(record)
        await BatchLog(store, log_prefix("t", record.batch_id)).append("claim", 1)
        made.append(record.batch_id)
    await store.delete(open_name("t", made[1]))  # this batch has ended
    sweeper = Sweeper(store)
    assert await sweeper.sweep(now) == 0
    # The first file and the ended batch have expired. An open batch reads the third file.
    assert await sweeper.sweep(now + 2 * HOUR_S) == 4
    names = {each.name for each in await store.objects("")}
    assert file_name("t", ids[0]) not in names
    assert {file_name("t", name) for name in (ids[1], ids[2], left)} <= names
    assert await batches.open_ids("t") == [made[0]]
    # Bytes without a record stay for a day, in which their upload may end.
    assert await sweeper.sweep(now + LEFT_S + 1) == 3
    names = {each.name for each in await store.objects("")}
    assert file_name("t", left) not in names
    assert not [name for name in names if made[1] in name]
    assert [name for name in names if made[0] in name]


async def test_one_router_sweeps_at_a_time(store: FolderStore) -> None:
    one, two = Sweeper(store), Sweeper(store)
    now = time.time() // SWEEP_S * SWEEP_S
    assert [await each.is_due(now + 1) for each in (one, two, one)] == [True, False, False]
    assert await two.is_due(now + SWEEP_S)
    assert await one.sweep(now + LEFT_S + 2 * SWEEP_S) == 2  # the marks
    assert not await store.objects("")
