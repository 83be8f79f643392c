"""The config of DeepSeek V4: kinds of layers, compressors, positions and residual streams."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.engine.cache.layout.kv_groups import layer_groups, model_layout
from tandem.errors import UnsupportedModel
from tandem.models.config.compressor import Compressor
from tandem.models.config.indexer import Indexer
from tandem.models.config.model import ModelConfig

V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}
CHOSEN = Compressor(4, 512, Indexer(64, 128, 64, has_pairs=True, top_k=512))
ALL = Compressor(128, 512)


def test_what_config_json_may_leave_out() -> None:
    config = ModelConfig.from_hf(V4)
    assert [layer.compressor for layer in config.layers] == [ALL, ALL, ALL, CHOSEN, ALL]
    assert [layer.experts and layer.experts.has_table for layer in config.layers] == [
        *(True, True, True),
        *(False, False),
    ]
    assert {layer.window for layer in config.layers} == {128}
    assert {layer.rope.theta for layer in config.layers} == {160000.0}
    assert config.shared_kv is not None
    assert config.shared_kv.rope_dim == 64
    assert config.max_model_len == 4096


def test_keys_of_the_published_config() -> None:
    config = ModelConfig.from_hf(
        V4
        | {
            "compress_ratios": [0, 4, 128, 4, 0, 0],
            "num_hash_layers": 1,
            "qk_rope_head_dim": 32,
            "num_nextn_predict_layers": 1,
            "rope_theta": 5000,
            "compress_rope_theta": 6000,
            "max_position_embeddings": 8192,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 512,
            },
        }
    )
    kinds = [layer.compressor and layer.compressor.rate for layer in config.layers]
    assert kinds == [None, 4, 128, 4, None]
    assert [layer.experts and layer.experts.has_table for layer in config.layers] == [
        True,
        *[False] * 4,
    ]
    ropes = [layer.rope for layer in config.layers]
    assert [rope.theta for rope in ropes] == [5000, 6000, 6000, 6000, 5000]
    assert ropes[0].scaling is None
    assert ropes[1].scaling is not None
    assert ropes[1].attention_factor == 1.0
    assert config.shared_kv is not None
    assert config.shared_kv.rope_dim == 32
    assert config.max_model_len == 8192


def test_kv_groups() -> None:
    config = ModelConfig.from_hf(V4 | {"compress_ratios": [0, 4, 128, 4, 0]})
    assert list(layer_groups(config).values()) == [(1, 2, 3), (0, 1, 2, 3, 4), (1, 3), (2,)]
    layout = model_layout(config, block_size=64, dtype="bfloat16")
    assert [group.window for group in layout.groups] == [None, 128, 8, 128]
    # A block has 16 entries of 512 + 128 numbers in two layers, and one of 512 numbers in another.
    assert [group.layout.block_bytes for group in layout.groups] == [
        2 * (2 * 16 * 640 + 512),
        2 * 64 * 512 * 5,
        2 * 64 * 4 * 640 * 2,
        2 * 64 * 2 * 512,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types has 'full_attention'"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must be a list with a value for"),
        ({"compress_ratios": [0, 8, 0, 0, 0]}, "compress_ratios has 8; supported are 0, 4, 128"),
        ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types has 'dense'; supported are hash_moe"),
        ({"compress_rates": 4}, "compress_rates is 4; it must be an object"),
        ({"o_groups": 3}, "o_groups is 3; it must divide num_attention_heads, 8"),
        ({"partial_rotary_factor": 0.006}, "rope_parameters rotate 3 of 512 elements"),
        ({"index_head_dim": 32}, "index_head_dim is 32; it must be at least 64"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4', which is not supported"),
        ({"sliding_window": None}, "sliding_window is None; it must be a positive integer"),
        (
            {"rope_parameters": {"main": {"rope_type": "linear", "factor": 2}, "compress": {}}},
            "rope_parameters.main has a scaling",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}},
            "rope_parameters and rope_scaling must not be set together",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope scaling 'linear' is not supp"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(V4 | changes)
