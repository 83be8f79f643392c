"""The config of DeepSeek V2 and V3: latent attention, and experts in groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tandem.errors import UnsupportedModel
from tandem.models.config.experts import ExpertGroups, Experts
from tandem.models.config.latent import Latent
from tandem.models.config.model import ModelConfig

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
DEEPSEEK = {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 5,
    "num_experts_per_tok": 6,
}
DEEPSEEK_V2 = {"architectures": ["DeepseekV2ForCausalLM"]} | DEEPSEEK
DEEPSEEK_V3 = {"architectures": ["DeepseekV3ForCausalLM"]} | DEEPSEEK
YARN = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}


def test_deepseek_v2() -> None:
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    more = {"routed_scaling_factor": 16.0, "first_k_dense_replace": 1, "rope_scaling": YARN}
    config = ModelConfig.from_hf(SIZES | DEEPSEEK_V2 | grouped | more, None)
    experts = Experts(
        64, 6, 1407, False, groups=ExpertGroups(8, 3), scale=16.0, shared_inner=2 * 1407
    )
    assert [layer.experts for layer in config.layers] == [None, *[experts] * 4]
    scale = 192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2
    assert config.latent == Latent(512, 64, 128, 128, 1536, True, pytest.approx(scale))
    assert (config.num_kv_heads, config.head_dim, config.rope_dim) == (1, 576, 64)
    assert config.attention_scale == pytest.approx(scale)
    assert config.layers[0].rope.attention_factor == 1.0
    assert config.max_model_len == 512  # which has the scaling in it
    greedy = ModelConfig.from_hf(SIZES | DEEPSEEK_V2 | {"q_lora_rank": None}, None)
    assert greedy.latent == Latent(512, 64, 128, 128, None, True, 192**-0.5)
    assert greedy.layers[0].experts == Experts(64, 6, 1407, False, shared_inner=2 * 1407)


def test_deepseek_v3() -> None:
    config = ModelConfig.from_hf(SIZES | DEEPSEEK_V3 | {"num_nextn_predict_layers": 1}, None)
    experts = Experts(
        256,
        6,
        2048,
        True,
        has_sigmoids=True,
        is_corrected=True,
        groups=ExpertGroups(8, 4),
        scale=2.5,
        shared_inner=2048,
    )
    assert [layer.experts for layer in config.layers] == [*[None] * 3, *[experts] * 2]
    assert config.num_extra_layers == 1
    assert config.latent == Latent(512, 64, 128, 128, 1536, True, 192**-0.5)
    one = SIZES | DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1, "rope_interleave": False}
    config = ModelConfig.from_hf(one, None)
    assert config.layers[3].experts == replace(experts, groups=None)
    assert config.latent is not None
    assert not config.latent.has_pairs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob is True, which is not supported"),
        (
            DEEPSEEK_V2 | {"topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc'.*supported are greedy, group_limited_greedy",
        ),
        (DEEPSEEK_V2 | {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'.*softmax"),
        (DEEPSEEK_V2 | {"moe_layer_freq": 2}, "moe_layer_freq is 2, which is not supported"),
        (DEEPSEEK_V2 | {"topk_method": "group_limited_greedy"}, "n_group is None; it must be"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func is 'softmax'.*sigmoid"),
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "topk_method is 'greedy'.*noaux_tc"),
        (
            DEEPSEEK_V3 | {"n_group": 7},
            "n_group is 7 and topk_group is 4; n_group must divide the 256 experts",
        ),
        (DEEPSEEK_V3 | {"n_group": 256}, "equal groups of at least 2"),
        (
            DEEPSEEK_V3 | {"n_group": 128, "topk_group": 2},
            "at most 4, the number of experts in 2 groups .topk_group.",
        ),
        (DEEPSEEK_V3 | {"num_key_value_heads": 8}, "num_key_value_heads is 8; with latent"),
        (DEEPSEEK_V3 | {"kv_lora_rank": None}, "kv_lora_rank is None; it must be a positive"),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": 9}, "qk_rope_head_dim is 9; it must be an even"),
        (DEEPSEEK_V3 | {"q_lora_rank": 0}, "q_lora_rank is 0; it must be a positive integer"),
        (DEEPSEEK_V3 | {"n_shared_experts": None}, "n_shared_experts is None; it must be"),
        (DEEPSEEK_V3 | {"first_k_dense_replace": None}, "first_k_dense_replace is None"),
        (DEEPSEEK_V3 | {"routed_scaling_factor": 0}, "routed_scaling_factor is 0; it must be"),
        (DEEPSEEK_V3 | {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        (
            DEEPSEEK_V3 | {"rope_scaling": YARN | {"mscale_all_dim": "1"}},
            "mscale_all_dim is '1'; it must be a number > 0",
        ),
    ],
)
def test_flags_that_cannot_be_run_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(SIZES | changes, None)
