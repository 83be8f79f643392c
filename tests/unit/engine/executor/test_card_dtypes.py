"""Dtypes that a CUDA device cannot compute, with stand-ins for the device."""

from __future__ import annotations

import logging

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.card_dtypes import check_dtypes
from tandem.engine.executor.runner import has_bfloat16
from tandem.errors import ConfigError

CUDA = torch.device("cuda")
CONFIG = EngineConfig(model="m")


def set_card(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


@pytest.mark.parametrize("option", ["dtype", "kv_dtype"])
def test_bfloat16_is_refused_where_the_card_has_none(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model="m", **{option: "bfloat16"})  # type: ignore[arg-type]
    set_card(monkeypatch, "Tesla T4", (7, 5))
    assert not has_bfloat16(CUDA)
    name = option.replace("_", "-")
    with pytest.raises(ConfigError) as error:
        check_dtypes(config, CUDA, dtype="bfloat16", checkpoint_dtype="bfloat16")
    assert str(error.value) == (
        f"{name}=bfloat16 needs a card with compute capability 8.0 or later, not Tesla T4 (compute "
        f"capability 7.5); use {name}=auto (float32 on this card)"
    )
    set_card(monkeypatch, "NVIDIA A100", (8, 0))
    assert has_bfloat16(CUDA)
    check_dtypes(config, CUDA, dtype="bfloat16", checkpoint_dtype="bfloat16")


def test_an_old_card_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_card(monkeypatch, "Tesla V100", (7, 0))
    check_dtypes(CONFIG, CUDA, dtype="float32", checkpoint_dtype="float16")
    assert not caplog.records


def test_a_checkpoint_in_float16_loses_bits_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_card(monkeypatch, "NVIDIA H200", (9, 0))
    with caplog.at_level(logging.WARNING):
        check_dtypes(CONFIG, CUDA, dtype="bfloat16", checkpoint_dtype="bfloat16")
        check_dtypes(CONFIG, CUDA, dtype="float32", checkpoint_dtype="float16")
        check_dtypes(CONFIG, torch.device("cpu"), dtype="bfloat16", checkpoint_dtype="float16")
        assert not caplog.records
        check_dtypes(CONFIG, CUDA, dtype="bfloat16", checkpoint_dtype="float16")
    assert "use dtype=float32 to keep all bits" in caplog.text
