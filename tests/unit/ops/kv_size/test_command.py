"""`tandem kv-size` as a command: what it reads, what it prints, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.common.perf_model.rates import WorkerRates
from tests.harness.documents import ROOT

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
PAGE = (ROOT / "docs" / "kv_size.md").read_text()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("Llama-3-8B") / "config.json"
    file.write_text(json.dumps(LLAMA_3_8B))
    return file


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem.ops.cli", "kv-size", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def told(*arguments: str | Path) -> Any:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_config_json_alone_will_do(llama: Path) -> None:
    answer = told(llama, "--batch", "64", "--tensor-parallel", "1,8,16", "--memory", "80")
    assert answer == told(llama.parent, "--batch", "64", "--tensor-parallel", "1,8,16") | {
        "model": str(llama),
        "device": answer["device"],
    }
    assert answer["parameters"] == 8_030_261_248
    bf16 = next(row for row in answer["dtypes"] if row["dtype"] == "bfloat16")
    assert (bf16["token_bytes"], bf16["batch_bytes"]) == (131_072, 64 << 30)
    assert [row["heads_per_rank"] for row in answer["ranks"]] == [8, 1, 1]
    assert len(answer["device"]) == 3 * len(answer["dtypes"])
    assert answer["workers"] is None


def test_a_gguf_file_is_read_and_not_converted(tmp_path: Path) -> None:
    answer = told("smollm2", "--context", "100")
    assert answer["dtypes"][0]["sequence_blocks"] == 7
    assert (answer["layers"], answer["kv_heads"], answer["head_dim"]) == (30, 3, 64)


def test_workers_follow_from_rates_of_a_file(llama: Path, tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    rates.write_bytes(msgspec.json.encode(WorkerRates()))
    load = ("--rate", "2", "--prompt", "512", "--completion", "64")
    slow = told(llama, *load, "--rates", rates)
    assert slow["rates"]["prefill"]["token_s"] == 1e-3
    assert slow["workers"]["prefill"] == 2
    assert told(llama, *load)["workers"]["prefill"] == 1


def test_the_tables_are_those_of_the_page(llama: Path) -> None:
    for more in (
        ("--batch", "64"),
        ("--batch", "16", "--tensor-parallel", "1,2,8", "--memory", "80", "--rate", "20"),
    ):
        shown = run(llama, *more)
        assert shown.returncode == 0, shown.stderr
        for line in shown.stdout.splitlines():
            assert line.rstrip().replace(str(llama), "Llama-3-8B/config.json") in PAGE


@pytest.mark.parametrize(
    ("arguments", "status", "names"),
    [
        (["--tensor-parallel", "3"], 1, "tensor_parallel 3 does not divide 8 KV heads"),
        (
            ["--tensor-parallel", "0"],
            2,
            "tensor-parallel is '0'; it must be one or more numbers of at least 1",
        ),
        (["--tensor-parallel", "two"], 2, "two"),
        (["--kv-dtype", "int7"], 2, "kv-dtype is 'int7'; it must be one of bfloat16"),
        (["--context", "-1"], 2, "context"),
        (["--rates", "/nosuch.json", "--rate", "1"], 1, "/nosuch.json"),
        (["--memory", "8", "--rate", "1"], 1, "--memory 8"),
    ],
)
def test_wrong_options_are_named(
    llama: Path, arguments: list[str], status: int, names: str
) -> None:
    done = run(llama, *arguments)
    assert done.returncode == status
    assert len(done.stderr.splitlines()) == 1
    assert names in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing.gguf", "absent.json"])
def test_a_model_that_is_not_there_is_named(model: str) -> None:
    done = run(model)
    assert done.returncode == 1
    assert Path(model).name in done.stderr


def test_a_model_that_cannot_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B | {"hidden_act": "relu"}))
    done = run(tmp_path)
    assert done.returncode == 1
    assert "hidden_act is 'relu', which is not supported" in done.stderr
