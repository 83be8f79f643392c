"""Settings that a model's shape refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.common.config.engine import EngineConfig
from tandem.errors import ConfigError
from tandem.models.config.experts import Experts
from tandem.models.config.linear_attention import GatedDelta
from tandem.models.limits import check_settings, why_not_kv_dtype, why_not_tensor_parallel
from tandem.models.source import resolve


@pytest.mark.parametrize(
    ("heads", "kv_heads", "possible"),
    [
        (9, 3, [1, 3, 9]),  # SmolLM2
        (8, 4, [1, 2, 4, 8]),
        (8, 1, [1, 2, 4, 8]),
        (64, 8, [1, 2, 4, 8, 16, 32, 64]),  # Llama 3 70B
        (6, 2, [1, 2, 6]),
    ],
)
def test_ranks_share_whole_heads(heads: int, kv_heads: int, possible: list[int]) -> None:
    model = replace(resolve("smollm2").config, num_attention_heads=heads, num_kv_heads=kv_heads)
    assert [n for n in range(1, heads + 1) if not why_not_tensor_parallel(model, n)] == possible


def test_heads_that_cannot_be_divided_are_named() -> None:
    model = resolve("smollm2").config
    with pytest.raises(
        ConfigError, match=r"9 query heads and 3 KV heads cannot be divided among 2"
    ):
        check_settings(EngineConfig(model="", tensor_parallel=2), model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 3}, "tensor-parallel is 3; it must be 1"),
        ({"lora": {"a": "/a"}}, "LoRA adapters are not supported"),
        ({"weights": "int8"}, "weights=int8 is not supported"),
        ({"numerics": "invariant"}, "numerics=invariant is not supported"),
        ({"kernels": "native"}, "kernels=native is not supported"),
        ({"kv_dtype": "int4"}, "the KV dtype int4 is not supported"),
    ],
)
def test_what_transformers_does_not_support_is_named(
    settings: dict[str, Any], message: str
) -> None:
    model = replace(resolve("smollm2").config, implementation="transformers")
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM is computed .*: {message}"):
        check_settings(EngineConfig(model="", **settings), model)
    check_settings(EngineConfig(model="", kv_dtype="int8", kernels="torch"), model)


def test_int4_kv_is_refused_with_states() -> None:
    model = resolve("smollm2").config
    linear = GatedDelta(num_key_heads=2, num_value_heads=2, key_dim=16, value_dim=16, kernel=4)
    with_states = replace(model, layers=(replace(model.layers[0], linear=linear), model.layers[1]))
    assert "int4 is not supported for a model with linear" in why_not_kv_dtype(with_states, "int4")
    assert not why_not_kv_dtype(with_states, "int8")


def test_experts_are_divided_only_if_there_are_enough() -> None:
    model = replace(resolve("smollm2").config, num_attention_heads=4, num_kv_heads=4)
    options = EngineConfig(model="", tensor_parallel=4, expert_parallel=True)
    with pytest.raises(ConfigError, match="expert-parallel is set, but the model has no experts"):
        check_settings(options, model)
    experts = Experts(num=3, top_k=1, inner=8, is_normalized=True)
    with_experts = replace(model, layers=(replace(model.layers[0], experts=experts),))
    with pytest.raises(ConfigError, match="3 experts for 4 ranks"):
        check_settings(options, with_experts)
    check_settings(replace(options, tensor_parallel=2), with_experts)
