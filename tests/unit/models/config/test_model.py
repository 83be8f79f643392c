import json

import pytest
import transformers

from tandem.errors import UnsupportedModel
from tandem.models.config.experts import Experts
from tandem.models.config.model import GateClamp, ModelConfig, Multipliers, read_eos_token_ids
from tandem.models.config.rope import Rope
from tandem.models.source import read_folder

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SIZES = {
    name: LLAMA[name]
    for name in LLAMA
    if name.startswith(("vocab", "hidden", "inter", "num_", "max_"))
}


def llama(**changes: object) -> dict[str, object]:
    return LLAMA | changes


def test_llama_as_transformers_4_writes_it():
    config = ModelConfig.from_hf(LLAMA, None)
    assert (config.num_layers, config.num_attention_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.layers[0].rope) == (16, Rope(500000.0))
    assert (config.max_model_len, config.torch_dtype) == (512, "bfloat16")
    assert config.eos_token_ids == (2,)
    flags = (config.qkv_bias, config.attention_out_bias, config.mlp_bias, config.qk_norm)
    assert flags == (False, False, False, "")


def test_transformers_5_spelling_reads_the_same():
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
    new = llama(rope_parameters=rope, dtype="bfloat16")
    del new["rope_theta"], new["torch_dtype"]
    old = llama(rope_scaling={"type": "linear", "factor": 4.0})
    assert ModelConfig.from_hf(new, None) == ModelConfig.from_hf(old, None)


@pytest.mark.parametrize(
    ("config_class", "options", "expected"),
    [
        ("LlamaConfig", {}, {}),
        (
            "LlamaConfig",
            {"attention_bias": True, "mlp_bias": True},
            {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
        ),
        ("MistralConfig", {"sliding_window": None}, {}),
        ("Qwen2Config", {}, {"qkv_bias": True, "attention_out_bias": False}),
        ("Qwen3Config", {"head_dim": 32}, {"qk_norm": "head", "head_dim": 32, "qkv_bias": False}),
    ],
)
def test_the_weights_of_each_family_have_the_shapes_we_read(
    tmp_path, config_class, options, expected
):
    """Against a model that transformers makes from the same config, saved and read again."""
    hf_config = getattr(transformers, config_class)(**SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(hf_config)
    model.save_pretrained(tmp_path)
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()), None)
    assert {name: getattr(config, name) for name in expected} == expected
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    layer = "model.layers.1"
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    assert shapes[f"{layer}.self_attn.q_proj.weight"] == (q_rows, config.hidden_size)
    assert shapes[f"{layer}.self_attn.k_proj.weight"] == (kv_rows, config.hidden_size)
    assert shapes[f"{layer}.mlp.up_proj.weight"] == (config.intermediate_size, config.hidden_size)
    assert (f"{layer}.self_attn.q_proj.bias" in shapes) == config.qkv_bias
    assert (f"{layer}.self_attn.o_proj.bias" in shapes) == config.attention_out_bias
    assert (f"{layer}.mlp.down_proj.bias" in shapes) == config.mlp_bias
    assert (f"{layer}.self_attn.q_norm.weight" in shapes) == bool(config.qk_norm)
    assert f"model.layers.{config.num_layers}.input_layernorm.weight" not in shapes


def test_generation_config_decides_what_ends_a_sequence():
    assert read_eos_token_ids({"eos_token_id": 2}, {"eos_token_id": [5, 6]}) == (5, 6, 2)
    assert read_eos_token_ids({"eos_token_id": [2, 5]}, {"eos_token_id": 5}) == (5, 2)
    nested = {"eos_token_id": None, "text_config": {"eos_token_id": [7]}}
    assert read_eos_token_ids(nested, {"eos_token_id": 5}) == (5, 7)
    for wrong in ("2", True, 2.0, -1, [2, "3"], {"a": 2}):
        with pytest.raises(
            UnsupportedModel, match=r"eos_token_id of .* a token id or a list of th"
        ):
            read_eos_token_ids({"eos_token_id": wrong}, None)
    assert read_eos_token_ids({"eos_token_id": 2}, {"temperature": 1}) == (2,)
    assert read_eos_token_ids({"eos_token_id": None}, None) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported.*Qwen3"),
        ({"architectures": ["Rwkv7ForCausalLM"]}, "Rwkv7ForCausalLM is not supported"),
        ({"architectures": []}, "none named"),
        ({"quantization_config": {"quant_method": "x"}}, "quant_method is 'x'"),
        (
            {"hidden_act": "gelu"},
            "hidden_act is 'gelu', which is not supported; supported are silu",
        ),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3; it must divide num_attention_heads, 4",
        ),
        ({"hidden_size": None}, "hidden_size is None; it must be a positive integer"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776; .* at most 4096"),
    ],
)
def test_what_cannot_be_run_is_named(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(llama(**changes), None)


def test_a_model_of_images_is_refused_by_name_before_a_weight_is_read(tmp_path):
    """The config is as of Aya Vision: the sizes of its decoder are one level below."""
    config = {
        "architectures": ["AyaVisionForConditionalGeneration"],
        "model_type": "aya_vision",
        "text_config": SIZES | {"model_type": "cohere2"},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 896},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    named = "AyaVisionForConditionalGeneration is not supported, and neither is its text part"
    with pytest.raises(UnsupportedModel, match=named):
        read_folder(tmp_path)


MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 64, "num_hidden_layers": 4}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64, "num_hidden_layers": 4}
GEMMA2 = GEMMA3 | {"architectures": ["Gemma2ForCausalLM"]}
TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (MISTRAL | {"sliding_window": 128}, 128),
        (MISTRAL | {"max_position_embeddings": 32768}, 4096),  # transformers' default
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, 64),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}, 64),
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 512}, None),  # as long as the context
        (QWEN2 | {"use_sliding_window": False}, None),
        (QWEN2 | {"use_sliding_window": True}, None),  # transformers leaves out 28 layers
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 4}, None),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 4}, None),
        ({"sliding_window": 64}, None),  # Llama has none, whatever its file says
    ],
)
def test_a_window_of_all_layers(changes, window):
    config = ModelConfig.from_hf(llama(**changes), None)
    assert {layer.window for layer in config.layers} == {window}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, "0111"),
        (QWEN2 | {"use_sliding_window": True, "layer_types": TYPES}, "1101"),
        (QWEN3 | {"use_sliding_window": True, "max_window_layers": 3}, "0001"),
        (SMOLLM3 | {"use_sliding_window": True, "sliding_window": 64}, "0001"),
        (SMOLLM3 | {"sliding_window": 64}, "0000"),
        (GEMMA3, "1111"),
        (GEMMA3 | {"sliding_window_pattern": 2}, "1010"),
        (GEMMA3 | {"layer_types": TYPES}, "1101"),
        (GEMMA2, "1010"),
    ],
)
def test_windows_of_some_layers(changes, windows):
    layers = ModelConfig.from_hf(llama(**changes), None).layers
    assert [layer.window for layer in layers] == [64 if each == "1" else None for each in windows]


@pytest.mark.parametrize(
    ("changes", "ropes"),
    [
        (SMOLLM3, "rrr-"),
        (SMOLLM3 | {"no_rope_layer_interval": 2}, "r-r-"),
        (SMOLLM3 | {"no_rope_layers": [0, 1, 1, 0]}, "-rr-"),
        (QWEN2 | {"no_rope_layers": [0, 1, 1, 0]}, "rrrr"),
    ],
)
def test_layers_without_a_rope(changes, ropes):
    layers = ModelConfig.from_hf(llama(**changes), None).layers
    assert [layer.rope.theta for layer in layers] == [
        500000.0 if each == "r" else None for each in ropes
    ]


def test_gemma_3():
    scaling = {"rope_type": "linear", "factor": 8.0}
    changes = GEMMA3 | {"rope_scaling": scaling, "rope_local_base_freq": 300.0}
    config = ModelConfig.from_hf(llama(**changes, sliding_window_pattern=2), None)
    assert [layer.rope.theta for layer in config.layers] == [300.0, 500000.0] * 2
    assert [layer.window for layer in config.layers] == [64, None] * 2
    assert config.max_model_len == 512  # which has the scaling in it
    assert (config.head_dim, config.tie_word_embeddings) == (256, True)
    assert (config.multipliers.embedding, config.attention_scale) == (8.0, 1 / 16)
    assert (config.activation, config.logit_cap, config.norm_offset) == ("gelu_tanh", None, 1.0)


@pytest.mark.parametrize(
    ("changes", "caps"),
    [
        (GEMMA2, (30.0, 50.0)),
        (GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": 3}, (3.0, None)),
        (GEMMA3, (None, None)),
        ({"attn_logit_softcapping": 50.0}, (None, None)),  # Llama has none
    ],
)
def test_caps(changes, caps):
    config = ModelConfig.from_hf(llama(**changes), None)
    assert (config.logit_cap, config.attention_cap) == caps


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 4}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("changes", "experts", "layers"),
    [
        (MIXTRAL, Experts(8, 2, 96, True), "1111"),
        (
            MIXTRAL | {"num_local_experts": 4, "num_experts_per_tok": 1},
            Experts(4, 1, 96, True),
            "1111",
        ),
        (QWEN3_MOE, Experts(128, 8, 768, False), "1111"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, Experts(128, 8, 768, False), "0101"),
        (
            QWEN3_MOE | {"mlp_only_layers": [0, 2], "norm_topk_prob": True, "num_experts": 9},
            Experts(9, 8, 768, True),
            "0101",
        ),
        ({"num_local_experts": 8}, None, "00"),  # Llama has none
    ],
)
def test_experts(changes, experts, layers):
    config = ModelConfig.from_hf(llama(**changes), None)
    found = [layer.experts for layer in config.layers]
    assert found == [experts if each == "1" else None for each in layers]


GPT_OSS = {"architectures": ["GptOssForCausalLM"], "rope_theta": 150000.0}


def test_gpt_oss():
    config = ModelConfig.from_hf(llama(**GPT_OSS), None)
    assert [layer.window for layer in config.layers] == [128, None]
    assert config.layers[0].experts == Experts(128, 4, 96, True, has_biases=True)
    assert (config.qkv_bias, config.attention_out_bias, config.has_sinks) == (True, True, True)
    assert (config.gate_clamp, config.is_mxfp4) == (GateClamp(1.702, 7.0), False)
    scaling = config.layers[0].rope.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.truncate) == ("yarn", 32.0, False)
    assert config.max_model_len == 512  # which has the scaling in it
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    assert ModelConfig.from_hf(llama(**GPT_OSS, **packed), None).is_mxfp4


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (QWEN3_MOE | {"sliding_window": 64}, None),
        (QWEN3_MOE | {"sliding_window": 64, "use_sliding_window": True}, 64),
        (MIXTRAL | {"sliding_window": 64}, 64),
        (MIXTRAL, None),
    ],
)
def test_windows_beside_experts(changes, window):
    config = ModelConfig.from_hf(llama(**changes), None)
    assert {layer.window for layer in config.layers} == {window}


def test_granite():
    keys = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "logits_scaling": 8.0}
    changes = {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.22, **keys}
    config = ModelConfig.from_hf(llama(**changes), None)
    assert config.multipliers == Multipliers(12.0, 0.1, 0.22, 0.125)
    assert ModelConfig.from_hf(llama(**keys), None).multipliers == Multipliers()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (MISTRAL | {"sliding_window": -1}, "sliding_window is -1; it must be a positive number"),
        (MISTRAL | {"sliding_window": "all"}, "sliding_window is 'all'"),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": TYPES[:2]},
            "layer_types must be a list with a value for each of 4 layers",
        ),
        (
            GEMMA3 | {"layer_types": ["linear_attention"] * 4},
            "layer_types has 'linear_attention', which is not supported",
        ),
        (GEMMA2 | {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1; it must be"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            GEMMA3 | {"hidden_activation": "gelu"},
            "hidden_activation is 'gelu', which is not supported",
        ),
        (GEMMA3 | {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None"),
        (MIXTRAL | {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method is 'mxfp4'"),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit is 0; it must be a number > 0"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts is 0; it must be a positive"),
        (
            MIXTRAL | {"num_experts_per_tok": 9},
            "num_experts_per_tok is 9; it must be at most the number of experts, 8",
        ),
        (QWEN3_MOE | {"mlp_only_layers": ["1"]}, "mlp_only_layers is .*a list of layer numbers"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75 is not supported"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; multi-token prediction"),
        (PHI3 | {"partial_rotary_factor": 0.07}, "rotates 1 of the .* dimensions of a head"),
        (
            PHI3
            | {
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]},
            },
            "'longrope' has a list of 1 factors; .* 4 frequencies",
        ),
        (
            PHI3 | {"rope_scaling": {"type": "yarn", "factor": 2}},
            "rope scaling 'yarn'.*supported is longrope",
        ),
    ],
)
def test_flags_that_cannot_be_run_are_named(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(llama(**changes), None)
