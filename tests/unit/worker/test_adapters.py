"""The adapters that a worker serves by name: its own, and those of the others when it is new."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.common.adapter import Adapter
from tandem.common.config.engine import EngineConfig, parse_adapters
from tandem.engine.types import AdapterStats
from tandem.errors import ConfigError
from tandem.worker.lifecycle.adapters import NamedAdapters
from tests.lora_adapters import write_adapter
from tests.tiny_models import make_tiny_model


def record(*named: Adapter, state: str = "ready") -> Any:
    return SimpleNamespace(state=state, adapters=SimpleNamespace(named=list(named)))


def adapter(name: str, digest: str, added_at: float = 1.0) -> Adapter:
    return Adapter(name, digest, f"/{name}", 4, added_at)


def test_a_new_worker_adopts_names_once() -> None:
    worker = NamedAdapters(EngineConfig(model="any"))
    worker.add(adapter("mine", "old", 5.0))
    worker.add(adapter("both", "old", 5.0))
    worker.adopt(
        [
            record(adapter("theirs", "early", 1.0), adapter("both", "new", 6.0)),
            record(adapter("theirs", "late", 2.0), adapter("mine", "older", 4.0)),
            record(adapter("leaves", "any"), state="draining"),
        ]
    )
    digests = {name: each.digest for name, each in worker.named.items()}
    assert digests == {"mine": "old", "both": "new", "theirs": "late"}
    worker.remove("theirs")
    worker.adopt([record(adapter("theirs", "late", 2.0))])
    assert "theirs" not in worker.named


async def test_its_own_are_described_at_its_start(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("llama", tmp_path / "model")
    write_adapter(tmp_path / "good", folder.config, r=4)
    config = EngineConfig(model=str(folder.path), lora=parse_adapters([f"sql={tmp_path}/good"]))
    worker = NamedAdapters(config)
    await worker.read_own()
    worker.stats = AdapterStats(loaded=["a"], failed=["b"])
    state = worker.state
    assert [(each.name, each.rank) for each in state.named] == [("sql", 4)]
    assert (state.loaded, state.failed, state.rank_max) == (["a"], ["b"], 64)
    (family,) = worker.metrics({"worker": "w"})
    assert family.samples[0].labels["max_lora"] == "8"
    with pytest.raises(ConfigError, match=r"lora sql: .*rank 4; max-lora-rank allows at most 3"):
        await NamedAdapters(replace(config, max_lora_rank=3)).read_own()


def test_a_gauge_names_the_adapters_of_running_and_waiting_sequences() -> None:
    """The gauge is vLLM's `vllm:lora_requests_info`, whose value is the time."""
    worker = NamedAdapters(EngineConfig(model="any", max_loras=3))
    expected = {"worker": "w", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    for stats in (
        AdapterStats(),
        AdapterStats(loaded=["d1", "d2"], running=["sql"], waiting=["chat", "sql"]),
    ):
        worker.stats = stats
        started = time.time()
        (family,) = worker.metrics({"worker": "w"})
        (sample,) = family.samples
        assert (family.type, sample.name) == ("gauge", "tandem_lora_requests_info")
        assert sample.labels == {**expected, "max_lora": "3"}
        assert started <= sample.value <= time.time()
        expected |= {"running_lora_adapters": "sql", "waiting_lora_adapters": "chat,sql"}


def test_options_name_adapters() -> None:
    assert parse_adapters(["a=/x,b/1=/y", "c=/z"]) == {"a": "/x", "b/1": "/y", "c": "/z"}
    assert parse_adapters(["a=there"])["a"] == str(Path.cwd() / "there")
    for wrong in ("a", "=x", "a b=/x", "a="):
        with pytest.raises(ConfigError, match="an entry must be NAME=PATH"):
            parse_adapters([wrong])
    with pytest.raises(ConfigError, match="twice"):
        parse_adapters(["a=/x", "a=/y"])
    with pytest.raises(ConfigError, match="max-loras is 0"):
        EngineConfig(model="", lora={"a": "/x"}, max_loras=0)
