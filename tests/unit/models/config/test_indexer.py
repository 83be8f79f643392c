"""Indexers of sparse attention in config.json."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.config.engine import EngineConfig
from tandem.common.dtypes import IndexKeys
from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.config.indexer import Indexer
from tandem.models.config.model import ModelConfig
from tandem.models.limits import check_settings

GLM5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "n_routed_experts": 16,
}


M3: dict[str, Any] = {
    "architectures": ["MiniMaxM3VLForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rope_parameters": {"partial_rotary_factor": 0.5},
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
}


def full_layers(**changes: Any) -> list[int]:
    config = ModelConfig.from_hf(GLM5 | changes)
    assert [layer.shares_choice for layer in config.layers] == [
        layer.indexer is None for layer in config.layers
    ]
    return [i for i, layer in enumerate(config.layers) if layer.indexer is not None]


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"index_topk_freq": 3}, [0, 1, 4]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, [0, 1, 2, 4]),
        ({"index_topk_pattern": "FSSFSSF"}, [0, 3]),
        ({"indexer_types": ["full", "shared"] * 3, "index_topk_freq": 3}, [0, 2, 4]),
    ],
)
def test_layers_with_an_indexer_of_their_own(changes: dict[str, Any], layers: list[int]) -> None:
    assert full_layers(**changes) == layers
    assert ModelConfig.from_hf(GLM5 | changes).index_keys == IndexKeys(len(layers), 128)


def test_all_layers_of_deepseek_have_an_indexer() -> None:
    config = ModelConfig.from_hf(
        GLM5 | {"architectures": ["DeepseekV32ForCausalLM"], "index_topk_freq": 3}
    )
    expected = Indexer(num_heads=64, dim=128, rope_dim=64, has_pairs=False, top_k=2048)
    assert [layer.indexer for layer in config.layers] == [expected] * 6


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (4, 128, 16, 128, 1)),
        (
            {
                "layer_types": None,
                "sparse_attention_config": {
                    "sparse_attention_freq": [0, 1, 1],
                    "sparse_num_index_heads": 4,
                    "sparse_index_dim": 96,
                    "sparse_topk_blocks": 9,
                    "sparse_block_size": 64,
                    "sparse_local_block": 2,
                },
            },
            (4, 96, 9, 64, 2),
        ),
    ],
)
def test_minimax_m3_chooses_blocks(
    changes: dict[str, Any], expected: tuple[int, int, int, int, int]
) -> None:
    heads, dim, top_k, block_size, num_local = expected
    config = ModelConfig.from_hf(M3 | changes)
    indexer = Indexer(
        num_heads=heads,
        dim=dim,
        rope_dim=64,
        has_pairs=False,
        top_k=top_k,
        block_size=block_size,
        num_local=num_local,
    )
    assert [layer.indexer for layer in config.layers] == [None, indexer, indexer]
    assert not any(layer.shares_choice for layer in config.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_n_heads": 2}, "index_n_heads is 2; it must be num_key_value_heads, 4"),
        ({"index_head_dim": 32}, "index_head_dim is 32; it must be at least 64"),
        ({"index_local_blocks": 17}, "index_local_blocks is 17; it must be at most"),
        ({"rotary_dim": 32}, "rotary_dim is 32, but partial_rotary_factor rotates 64 elements"),
        ({"layer_types": ["linear_attention"] * 3}, "supported are full_attention and minimax_m3"),
        ({"sparse_attention_config": 3}, "sparse_attention_config is 3; it must be an object"),
        (
            {"layer_types": None, "sparse_attention_config": {"sparse_attention_freq": [1]}},
            "sparse_attention_freq must be a list with a value for each of 3 layers",
        ),
    ],
)
def test_block_indexers_that_cannot_be_run_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(M3 | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank is null; the indexer"),
        ({"index_topk": 0}, "index_topk is 0; it must be a positive integer"),
        ({"index_head_dim": 32}, "index_head_dim is 32; it must be at least qk_rope_head_dim, 64"),
        ({"index_topk_pattern": "SFF" * 2}, "the first layer no indexer"),
        ({"index_topk_pattern": "FXF" * 2}, "index_topk_pattern has 'X', which is not supported"),
        ({"indexer_types": ["full"]}, "indexer_types must be a list with a value for each of 6"),
        ({"layer_types": ["full_attention"] * 6}, "all layers must be indexed_attention"),
        ({"rope_interleave": False}, "rope_interleave is False, which is not supported"),
    ],
)
def test_what_cannot_be_run_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(GLM5 | changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_dtype": "fp8_e4m3"}, "the KV dtype fp8_e4m3 is not supported for this model: an"),
        ({"kv_dtype": "int8"}, "the KV dtype int8 is not supported for this model: an indexer"),
    ],
)
def test_settings_that_sparse_attention_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(EngineConfig(model="", **settings), ModelConfig.from_hf(GLM5))
