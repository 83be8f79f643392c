"""`--verify-blocks` on a real cluster: a block that changes at its producer never becomes an
answer. That blocks which do not change pass is in test_exactness.py."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.e2e.conftest import StartCluster
from tests.harness.client import (
    golden,
    metric,
    open_client,
    stream_completion,
    tokens_of,
)
from tests.harness.cluster import LocalCluster
from tests.harness.kv_form import GROUPS_AND_INT8, KvForm
from tests.parity.models import engine_tokens

REMOTE_ALL = ("--local-prefill-max-tokens", "0")
CHANGED_EVERY = 512  # bytes of the pool: each block is changed


def pool_of(cluster: LocalCluster, worker_id: str) -> mmap.mmap:
    """The KV pool of a worker of this test, mapped here, too."""
    pid = cluster.workers[worker_id].process.pid
    for number in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(number).startswith("/memfd:tandem-kv"):
            with number.open("r+b") as memory:
                return mmap.mmap(memory.fileno(), 0)
    raise AssertionError(f"{worker_id} maps no pool")


@pytest.mark.parametrize(
    "form", [pytest.param(KvForm(), marks=pytest.mark.slow), GROUPS_AND_INT8], ids=str
)
async def test_a_block_that_changes_at_its_producer_is_caught(
    start_cluster: StartCluster, tmp_path: Path, form: KvForm
) -> None:
    """Changed after its announcement, which comes before the first token, and before its pull."""
    prompts, expected = golden(5)
    model = form.model(tmp_path)
    if not form.has_references:
        expected = engine_tokens(model, prompts, kv_dtype=form.kv_dtype, max_tokens=64)
    options = ("--transport", "grpc", "--verify-blocks", "all", "--transfer-delay", "3")
    with start_cluster(*options, *REMOTE_ALL, *form.options, model=model) as cluster:
        pool = pool_of(cluster, "prefill-0")
        async with open_client(cluster) as client:
            events = stream_completion(client, prompts[0])
            seen = [await anext(events)]
            while not tokens_of(seen):
                seen.append(await anext(events))
            for index in range(0, len(pool), CHANGED_EVERY):
                pool[index] ^= 0x40
            seen += [event async for event in events]
        assert tokens_of(seen) == expected[0]
        assert metric(cluster, "decode-0", "tandem_block_mismatches_total") >= 1
        assert metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total") == 0
        cluster.wait_idle()
