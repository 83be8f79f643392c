"""Layers that keep a state, as config.json describes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.engine.cache.layout.kv_groups import (
    LayerPlace,
    layer_groups,
    layer_places,
    state_places,
)
from tandem.engine.cache.layout.state_layout import PIECE_BYTES_MAX, StateLayout
from tandem.errors import UnsupportedModel
from tandem.models.config.linear_attention import (
    GatedDelta,
    KimiDelta,
    LinearAttention,
    Mamba2,
    ShortConv,
)
from tandem.models.config.model import ModelConfig
from tandem.models.lora.targets import find_modules, linear_shapes

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
OLMO = {"architectures": ["OlmoHybridForCausalLM"]}
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 8,
    "time_step_limit": [0.0, float("inf")],
}
FALCON = {
    "architectures": ["FalconH1ForCausalLM"],
    "mamba_n_heads": 8,
    "mamba_d_ssm": 128,
}
NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-*E"}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "full_attn_idxs": [1, 3],
    "block_multiple_of": 20,
}
# As Moonshot AI publishes it.
KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "full_attn_layers": [2, 4],
        "head_dim": 32,
        "kda_layers": [1, 3],
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 4096,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 2,
    "num_experts": 12,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "rope_scaling": None,
}


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(SIZES | config | changes)


def test_sizes_of_olmo_hybrid_that_are_absent() -> None:
    config = read(OLMO)
    delta = config.layers[0].linear
    assert isinstance(delta, GatedDelta)
    assert (delta.num_key_heads, delta.key_dim, delta.value_dim) == (4, 12, 24)
    assert delta.rate_max == 2.0
    assert [layer.has_attention for layer in config.layers] == [False, False, False, True]
    assert config.layers[3].rope.theta == 10000.0
    assert read(OLMO, rope_parameters={"rope_theta": None}).layers[3].rope.theta is None
    assert read(OLMO, rope_theta=None).layers[3].rope.theta is None
    given = read(OLMO, rope_theta=10.0, linear_allow_neg_eigval=False)
    assert given.layers[3].rope.theta == 10.0
    assert isinstance(given.layers[0].linear, GatedDelta)
    assert given.layers[0].linear.rate_max == 1.0


def test_granite_4_with_and_without_experts() -> None:
    config = read(GRANITE, shared_intermediate_size=20)
    assert [layer.has_attention for layer in config.layers] == [False, True, False, False]
    assert config.layers[0].experts is not None
    assert config.layers[0].experts.shared_inner == 20
    assert config.layers[1].rope.theta is None
    dense = read(
        GRANITE,
        num_local_experts=0,
        shared_intermediate_size=20,
        position_embedding_type="rope",
    )
    assert dense.layers[0].experts is None
    assert dense.intermediate_size == 20
    assert dense.layers[1].rope.theta == 10000.0


def test_lfm2_adjusts_the_size_of_its_mlps() -> None:
    config = read(LFM2)
    assert config.intermediate_size == 80  # 64 rounded up to a multiple of 20
    assert [isinstance(layer.linear, ShortConv) for layer in config.layers] == [True, False] * 2
    assert read(LFM2, block_auto_adjust_ff_dim=False).intermediate_size == 96
    assert read(LFM2, block_ff_dim=30, block_ffn_dim_multiplier=None).intermediate_size == 20


def test_kimi_linear_as_it_is_published() -> None:
    config = read(KIMI)
    assert [layer.has_attention for layer in config.layers] == [False, True, False, True]
    assert config.layers[0].linear == KimiDelta(num_delta_heads=3, dim=32, kernel=4)
    assert config.layers[0].experts is None
    experts = config.layers[1].experts
    assert experts is not None
    assert (experts.num, experts.top_k, experts.shared_inner) == (12, 3, 2 * 1024)
    assert config.layers[1].rope.theta is None
    assert config.max_model_len == 4096
    assert config.latent is not None
    assert config.latent.q_rank is None
    default = read(KIMI, linear_attn_config=None, num_hidden_layers=6)
    assert [layer.has_attention for layer in default.layers] == [*[False] * 4, True, False]


def test_adapters_of_kimi_linear_change_no_convolutions() -> None:
    config = read(KIMI)
    names = {name.removeprefix("model.layers.0.") for name in linear_shapes(config)}
    assert {f"self_attn.{part}_proj" for part in (*"qkvbo", "f_a", "f_b", "g_a", "g_b")} <= names
    with pytest.raises(UnsupportedModel, match=r"q_conv1d.*, which is not supported"):
        find_modules({"target_modules": ["q_proj", "q_conv1d"]}, config)


def with_kimi_layers(**changes: Any) -> dict[str, Any]:
    """Returns a change of `linear_attn_config`."""
    linear = KIMI["linear_attn_config"]
    assert isinstance(linear, dict)
    return {"linear_attn_config": linear | changes}


def test_the_places_of_layers_with_both_with_one_and_with_none() -> None:
    both = read(FALCON)
    assert list(layer_groups(both).values()) == [(0, 1, 2, 3), (0, 1, 2, 3)]
    assert layer_places(both)[2] == LayerPlace(0, 2)
    assert state_places(both)[2] == LayerPlace(1, 2)
    single = read(NEMOTRON)
    assert single.num_layers == 4
    assert list(layer_groups(single).values()) == [(2,), (0,)]
    assert layer_places(single) == [None, None, LayerPlace(0, 0), None]
    assert state_places(single) == [LayerPlace(1, 0), None, None, None]
    assert [layer.has_mlp for layer in single.layers] == [False, True, False, True]
    assert [layer.experts is None for layer in single.layers] == [True, True, True, False]


def test_heads_have_room_for_channels_that_they_cannot_share_equally() -> None:
    sizes = Mamba2(
        num_mamba_heads=48,
        num_groups=1,
        key_dim=128,
        value_dim=64,
        kernel=4,
        has_conv_bias=True,
        has_biases=False,
    )
    assert sizes.head_sections == [64, 3, 3]
    layout = StateLayout.of(sizes, num_slots=1, num_layers=36, block_size=16)
    assert layout.conv_shape == (3, 70)
    assert layout.layer_bytes == 4 * (128 * 64 + 3 * 70) + 56  # padded to 64 bytes


def test_ranks_have_the_channels_of_their_heads() -> None:
    sizes = read_sizes(
        NEMOTRON, n_groups=1, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=21
    )
    assert sizes.sections[1:] == [21, 21]
    parts = [sizes.channels_of(range(first, first + 2))[1] for first in (0, 2)]
    assert parts == [range(12), range(12, 21)]  # the last head has 3 channels, others 6
    conv = read_sizes(LFM2, hidden_size=256)
    assert (conv.num_heads, conv.num_outputs) == (4, 256)
    assert conv.channels_of(range(1, 2)) == [range(64, 128)]
    assert read_sizes(LFM2, hidden_size=96).num_heads == 1


def read_sizes(config: dict[str, Any], **changes: Any) -> LinearAttention:
    linears = [layer.linear for layer in read(config, **changes).layers]
    return next(linear for linear in linears if linear is not None)


def test_the_heads_of_a_rank_have_as_many_pieces_as_all() -> None:
    """The sizes of Qwen3-Next 80B, whose states have 77 MB."""
    delta = GatedDelta(16, 32, key_dim=128, value_dim=128, kernel=4)
    layout = StateLayout.of(delta, num_slots=2, num_layers=36, block_size=16)
    assert layout.block_bytes // layout.num_pieces <= PIECE_BYTES_MAX
    assert layout.num_pieces < 2 * layout.block_bytes / PIECE_BYTES_MAX
    for num_ranks in (2, 4, 8, 16):
        own = replace(layout, num_kv_heads=32 // num_ranks)
        assert own.num_pieces == layout.num_pieces
        assert own.block_bytes % own.num_pieces == 0
        assert own.block_bytes * num_ranks == layout.block_bytes


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GRANITE, {"layer_types": None}, "layer_types is missing"),
        (GRANITE, {"layer_types": ["mamba"] * 4}, "at least one layer must have full attention"),
        (GRANITE, {"layer_types": ["conv", "attention"] * 2}, "layer_types has 'conv'"),
        (GRANITE, {"mamba_d_head": 8}, "mamba_d_head 8; their product must be"),
        (GRANITE, {"mamba_n_groups": 3}, "mamba_n_groups is 3; it must divide"),
        (GRANITE, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is .*supported are silu"),
        (GRANITE, {"mamba_d_conv": 1}, "mamba_d_conv is 1; it must be at least 2"),
        (GRANITE, {"time_step_limit": [0.0, 0.1]}, "time_step_limit is .* must be .0, Infinity"),
        (FALCON, {"mamba_rms_norm": True}, "mamba_norm_before_gate is true"),
        (FALCON, {"mlp_multipliers": [1.0]}, "mlp_multipliers is .* list of 2 numbers"),
        (FALCON, {"projectors_bias": True}, "projectors_bias is True"),
        (LFM2, {"full_attn_idxs": "1"}, "full_attn_idxs is '1'; it must be a list of layer"),
        (LFM2, {"conv_L_cache": 1}, "conv_L_cache is 1; it must be at least 2"),
        (NEMOTRON, {"hybrid_override_pattern": "M?"}, "hybrid_override_pattern is 'M.'; it must"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'.*supported are relu2"),
        (NEMOTRON, {"moe_latent_size": 8}, "moe_latent_size is 8, which is not supported"),
        (KIMI, {"mla_use_nope": False}, "mla_use_nope is False, which is not supported"),
        (KIMI, {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling is .* not supported"),
        (KIMI, {"moe_router_activation_func": "softmax"}, "func is 'softmax'.*supported are sigm"),
        (KIMI, {"linear_attn_config": [1]}, "linear_attn_config is .1.; it must be an object"),
        (KIMI, with_kimi_layers(kda_layers=[1, 2]), "kda_layers of .* each number once"),
        (KIMI, with_kimi_layers(kda_layers=[0, 3]), "kda_layers of .* numbers from 1 to 4"),
        (KIMI, with_kimi_layers(kda_layers=3), "have 3 layers; they must have each of 4"),
        (KIMI, with_kimi_layers(head_dim="x"), "linear_head_dim is 'x'; it must be a positive"),
        (KIMI, with_kimi_layers(short_conv_kernel_size=1), "linear_conv_kernel_dim is 1; it must"),
    ],
)
def test_refusals_name_the_field(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(config, **changes)
