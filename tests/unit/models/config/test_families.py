"""Keys of single families that decide what is computed, or that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Olmo3Config

from tandem.errors import UnsupportedModel
from tandem.models.config.gemma3n import AltUp
from tandem.models.config.layers import Heads
from tandem.models.config.model import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def read(architecture: str, **more: Any) -> ModelConfig:
    return ModelConfig.from_hf(SIZES | {"architectures": [f"{architecture}ForCausalLM"]} | more)


def test_minimax_m2_names_the_number_of_rotated_elements() -> None:
    config = read("MiniMaxM2", head_dim=32, rotary_dim=8)
    assert config.layers[0].rope.rotary_dim(config.head_dim) == 8


def test_layers_of_gemma_4() -> None:
    config = read(
        "Gemma4",
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        layer_types=TYPES,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    )
    assert [config.heads_of(layer) for layer in config.layers] == [Heads(2, 16), Heads(1, 32)] * 2
    assert [layer.kv_source for layer in config.layers] == [None, None, 0, 1]
    assert [layer.inner for layer in config.layers] == [None, None, 192, 192]
    assert [layer.values_are_keys for layer in config.layers] == [False, True] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": None, "layer_types": None}, "sliding_window is None"),
        ({"layer_types": TYPES[::-1]}, "layer_types must end with full_attention"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, which is too large"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "different values of head_dim or num_key"),
        ({"per_layer_config": {"0": {"window": 8}}}, "only the keys head_dim and num_key_value"),
        ({"enable_moe_block": True}, "num_local_experts is None; it must be a positive integer"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, which is not supported"),
        ({"vocab_size_per_layer_input": 64}, "it must be at least vocab_size, 128"),
    ],
)
def test_what_gemma_4_cannot_have_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read("Gemma4", **{"layer_types": TYPES} | changes)


def test_experts_of_gemma_4_are_beside_the_mlp() -> None:
    sizes = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 40}
    shared = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "layer_types": TYPES}
    config = read("Gemma4", enable_moe_block=True, **sizes, **shared)
    experts = [layer.experts for layer in config.layers]
    assert [each and (each.num, each.top_k, each.inner) for each in experts] == [(8, 2, 40)] * 4
    assert [each and each.shared_inner for each in experts] == [96, 96, 192, 192]
    assert not any(layer.experts for layer in read("Gemma4", layer_types=TYPES, **sizes).layers)


def test_layers_of_gemma_3n() -> None:
    config = read(
        "Gemma3n",
        intermediate_size=[96, 64, 96, 80],
        layer_types=TYPES,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.95, 0, 0.0, 0.5],
        vocab_size_per_layer_input=120,
    )
    assert config.intermediate_size == 96
    assert [layer.inner for layer in config.layers] == [96, 64, 96, 80]
    assert [layer.sparsity for layer in config.layers] == [0.95, 0.0, 0.0, 0.5]
    assert [layer.kv_source for layer in config.layers] == [None, None, 0, 1]
    assert config.attention_scale == 1.0
    assert config.alt_up == AltUp(4, 0, True, 64)
    many = read("Gemma3n", num_hidden_layers=12, num_kv_shared_layers=0, sliding_window=40).layers
    assert [layer.sparsity for layer in many] == [0.95] * 10 + [0.0] * 2
    assert [layer.window for layer in many[3:6]] == [40, None, 40]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 4}, "altup_active_idx is 4; it must be less than altup_num_inputs"),
        ({"activation_sparsity_pattern": [1.0] * 4}, "must have a number of at least 0 and below"),
        ({"activation_sparsity_pattern": 0.5}, "must be a list with a value for each of 4 layers"),
        ({"intermediate_size": [96, 64]}, "must be a list with a value for each of 4 layers"),
        ({"intermediate_size": [96, 64, 0, 1]}, "intermediate_size is 0; it must be a positive"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, which is too large"),
    ],
)
def test_what_gemma_3n_cannot_have_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read("Gemma3n", **{"layer_types": TYPES, "num_kv_shared_layers": 0} | changes)


def test_layers_of_mimo_v2() -> None:
    config = read("MiMoV2Flash", head_dim=32, v_head_dim=16, sliding_window_size=40)
    assert [layer.window for layer in config.layers] == [None, 41, 41, 41]
    assert [layer.lacks_sinks for layer in config.layers] == [True, False, False, False]
    assert config.heads_of(config.layers[1]) == Heads(4, 32)
    assert (config.value_dim, config.value_scale) == (16, 0.707)
    with pytest.raises(UnsupportedModel, match="v_head_dim is 64; it must be at most head_dim, 32"):
        read("MiMoV2Flash", head_dim=32, v_head_dim=64)


def test_layers_of_llama_4() -> None:
    config = read("Llama4", attention_chunk_size=64, num_local_experts=4, intermediate_size_mlp=80)
    assert [(layer.window, layer.is_chunked) for layer in config.layers] == [
        *[(64, True)] * 3,
        (None, False),
    ]
    assert config.layers[0].rope.query_scaling is None
    assert config.layers[3].rope.query_scaling is not None
    assert config.intermediate_size == 80


def test_a_scaling_with_alpha_is_hunyuans_alone() -> None:
    scaled = {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
    scaling = read("HunYuanDenseV1", **scaled).layers[0].rope.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("alpha", 1000.0)
    with pytest.raises(UnsupportedModel, match="rope scaling 'alpha' is not supported"):
        read("Llama", **scaled)


def test_layers_of_olmo_3_have_one_theta_and_scaling_without_a_window() -> None:
    """The form of the published files, which transformers reads so."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    for theta in (500000.0, 10000.0):
        given = Olmo3Config(
            **SIZES, layer_types=TYPES, rope_theta=theta, rope_scaling=dict(scaling)
        )
        config = read("Olmo3", layer_types=TYPES, rope_theta=theta, rope_scaling=scaling)
        for layer, kind in zip(config.layers, TYPES, strict=True):
            expected = given.rope_parameters[kind]
            assert layer.rope.theta == expected["rope_theta"]
            assert (layer.rope.scaling is not None) == (expected["rope_type"] == "yarn")
