"""`tandem bench transfer` moves real blocks between real processes, and writes what it saw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tandem_bench.pool import differing, fill
from tandem_bench.sizes import plan, scattered

pytestmark = pytest.mark.service


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem.ops.cli", "bench", "transfer", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_measures_both_transports_and_writes_json(tmp_path: Path) -> None:
    output = tmp_path / "results" / "transfer.json"
    done = bench(
        *("--blocks", "1,4,64", "--repeats", "1", "--models", "SmolLM2-135M", "--idle", "0.2"),
        *("--pool-bytes", str(5 << 20), "--output", str(output)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SmolLM2-135M: 360 KiB a block" in done.stdout
    results = json.loads(output.read_text())
    (model,) = results["models"]
    assert (model["block_bytes"], model["cut"]) == (360 << 10, [64])
    assert [row["blocks"] for row in model["rows"]] == [1, 4]
    assert 0 <= model["idle_cpu_percent"] < 100
    for row in model["rows"]:
        assert row["bytes"] == row["blocks"] * model["block_bytes"]
        nixl, grpc = ("nixl_raw", "nixl", "nixl_blocks"), ("grpc_raw", "grpc_raw_memory", "grpc")
        for method in ("memcpy", *nixl, *grpc):
            figures = row[method]
            assert 0 < figures["min_s"] <= figures["median_s"] <= figures["max_s"] < 10
            assert figures["cpu_s_per_gb"] > 0
        assert row["grpc"]["lease_s"] > row["grpc"]["min_s"]
        assert row["nixl_ratio"] > 0
        assert row["grpc_ratio"] > 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--blocks", "0,4", "at least one block"),
        ("--models", "gpt-5", "no such model: gpt-5"),
        ("--pool-bytes", "1000", "no row fits"),
    ],
)
def test_options_that_make_no_sense_are_told(option: str, value: str, message: str) -> None:
    done = bench(option, value)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_block_in_the_wrong_place_or_with_a_wrong_byte_is_seen() -> None:
    memory = np.empty((3, 64), np.uint8)
    fill(memory)
    assert not any(differing(block, block_id) for block_id, block in enumerate(memory))
    assert differing(memory[1], 2)
    memory[1, -1] ^= 1
    assert differing(memory[1], 1)


def test_a_plan_keeps_the_rows_that_fit() -> None:
    assert plan("Llama-3-8B", (1, 512, 1024), 1 << 30).cut == (1024,)
    assert sorted(scattered(8, seed=1)) == list(range(8))
    assert scattered(8, seed=1) != scattered(8, seed=2)
