import json

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.errors import UnsupportedModel
from tandem.models.config.experts import ExpertGroups, Experts
from tandem.models.config.latent import Latent
from tandem.models.config.model import ModelConfig
from tandem.models.gguf.convert import converted_folder
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tests.unit.models.conftest import CONTROL, EOS, USER_DEFINED

NORM = {"output_norm.weight": np.ones(64, np.float32)}
DEEPSEEK: dict[str, object] = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 20,
    "rope.dimension_count": 16,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 64,
    "expert_shared_count": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert(tmp_path, tiny_gguf, tensors=NORM, **options) -> ModelConfig:
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tensors, **options)
    folder = converted_folder(file, cache_dir=tmp_path)
    read = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("config", "generation_config")
    )
    return ModelConfig.from_hf(*read)


def test_sizes_and_special_tokens(tmp_path, tiny_gguf):
    config = convert(tmp_path, tiny_gguf)
    assert config.vocab_size == tiny_gguf.vocab_size
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 96, 2)
    assert (config.num_attention_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.eos_token_ids == (tiny_gguf.eos,)
    assert (config.max_model_len, config.tie_word_embeddings) == (512, True)


def test_a_matrix_of_its_own_for_the_output(tmp_path, tiny_gguf):
    tensors = {"output.weight": np.zeros((tiny_gguf.vocab_size, 64), np.float32)}
    assert not convert(tmp_path, tiny_gguf, tensors).tie_word_embeddings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.5),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.key_length_swa", 32),
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.5),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.25),
        ("rope.scaling.yarn_ext_factor", 0.5),
    ],
)
def test_a_key_that_would_change_answers_and_is_not_read_is_refused(
    tmp_path, tiny_gguf, key, value
):
    with pytest.raises(UnsupportedModel, match=key):
        convert(tmp_path, tiny_gguf, keys={key: value})


def test_a_key_at_its_neutral_value_is_no_difference(tmp_path, tiny_gguf):
    neutral = {"attention.causal": True, "attention.scale": 0.0, "logit_scale": 1.0}
    assert convert(tmp_path, tiny_gguf, keys=neutral).architecture == "LlamaForCausalLM"


def test_yarn_and_linear_scaling(tmp_path, tiny_gguf):
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    config = convert(tmp_path, tiny_gguf, architecture="qwen2", keys=yarn)
    scaling = config.layers[0].rope.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("yarn", 4.0)
    assert config.max_model_len == 512


def test_the_table_of_llama_3_is_read_back_as_its_parameters(tmp_path, tiny_gguf):
    hf_config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters=dict(LLAMA3)
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf_config, torch.device("cpu"))
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    table = {"rope_freqs.weight": (plain / scaled).numpy()}
    scaling = convert(tmp_path, tiny_gguf, NORM | table).layers[0].rope.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("llama3", pytest.approx(32.0))
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
    assert scaling.original_max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", "MistralForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_a_window(tmp_path, tiny_gguf, architecture, name):
    window = {"attention.sliding_window": 128}
    config = convert(tmp_path, tiny_gguf, architecture=architecture, keys=window)
    assert config.architecture == name
    assert {layer.window for layer in config.layers} == {128}
    window = {"attention.sliding_window": 512}  # as long as the context
    config = convert(tmp_path, tiny_gguf, architecture=architecture, keys=window)
    assert {layer.window for layer in config.layers} == {None}


def test_tables_of_longrope_are_those_of_phi3(tmp_path, tiny_gguf):
    short = np.arange(1, 7, dtype=np.float32)
    long = np.arange(2, 8, dtype=np.float32)
    both = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    keys = {"rope.dimension_count": 12, "rope.scaling.original_context_length": 128}
    config = convert(tmp_path, tiny_gguf, NORM | both, architecture="phi3", keys=keys)
    rope = config.layers[0].rope
    assert rope.scaling is not None
    assert (rope.rotary_share, rope.scaling.original_max_position_embeddings) == (0.75, 128)
    assert rope.scaling.short_factors == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert rope.scaling.long_factors == (2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    for architecture, tables in (
        ("llama", both),
        ("phi3", {"rope_factors_long.weight": long}),
    ):
        with pytest.raises(
            UnsupportedModel, match="only together and only for the architecture phi3"
        ):
            convert(tmp_path, tiny_gguf, NORM | tables, architecture=architecture)


END, CALL = 3, 7  # tokens of one letter, which get other texts


@pytest.mark.parametrize(
    ("texts", "types", "more", "ends"),
    [
        ({END: "<end_of_turn>"}, {END: CONTROL}, {}, [EOS, END]),
        (
            {END: "<|im_end|>", CALL: "<|eot_id|>"},
            {END: CONTROL, CALL: CONTROL},
            {},
            [EOS, END, CALL],
        ),
        # No text has this by chance: a converter that did not mark it was wrong.
        ({END: "<end_of_turn>"}, {}, {}, [EOS, END]),
        ({END: "<|eom_id|>"}, {END: USER_DEFINED}, {}, [EOS, END]),
        # Such a text is an HTML tag in the vocabulary of Gemma.
        ({EOS: "<eos>", END: "</s>"}, {END: USER_DEFINED}, {}, [EOS]),
        ({EOS: "<eos>", END: "</s>"}, {END: CONTROL}, {}, [EOS, END]),
        # Of gpt-oss `<|end|>` ends a message; of others a turn.
        ({END: "<|end|>"}, {END: CONTROL}, {}, [EOS, END]),
        (
            {EOS: "<|return|>", END: "<|end|>", CALL: "<|call|>"},
            {END: CONTROL, CALL: CONTROL},
            {"tokenizer.ggml.eot_token_id": END},
            [EOS, CALL],
        ),
        (
            {EOS: "<|flush|>", END: "<|end|>", CALL: "<|calls|>"},
            {END: CONTROL, CALL: CONTROL},
            {},
            [EOS, CALL],
        ),
        (
            {EOS: "<turn|>", END: "<|tool_response>", CALL: "</s>"},
            {END: CONTROL, CALL: CONTROL},
            {},
            [EOS, END],
        ),
        # What a model of code writes between files, and pads with.
        (
            {END: "<|file_sep|>", CALL: "<|fim_pad|>"},
            {END: CONTROL, CALL: CONTROL},
            {},
            [EOS, END, CALL],
        ),
        ({END: "<PAD>", CALL: "[EOS]"}, {}, {}, [EOS]),
        # The file names them, whatever their text is.
        (
            {},
            {},
            {"tokenizer.ggml.eot_token_id": END, "tokenizer.ggml.eom_token_id": CALL},
            [EOS, END, CALL],
        ),
        ({EOS: "</s>"}, {}, {"tokenizer.ggml.eos_token_id": None}, [EOS]),
        ({EOS: "<x>"}, {}, {"tokenizer.ggml.eos_token_id": None}, []),
    ],
)
def test_tokens_that_end_an_answer(tmp_path, tiny_gguf, texts, types, more, ends):
    file = tiny_gguf.write(tmp_path / "m.gguf", NORM, tokens=texts, kinds=types, further=more)
    folder = resolve(str(file), cache_dir=tmp_path)
    assert list(folder.config.eos_token_ids) == ends
    tokenizer = Tokenizer.of(folder)
    assert list(tokenizer.eos_token_ids) == ends
    for token_id, text in texts.items():  # a prompt's are read as one token, and no answer shows it
        if token_id in ends:
            assert tokenizer.encode(text, add_special_tokens=False) == [token_id]
            assert tokenizer.is_special(token_id)


def test_defaults_of_sampling(tmp_path, tiny_gguf):
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.05}
    further = {f"general.sampling.{name}": value for name, value in sampling.items()}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", NORM, further=further)
    folder = converted_folder(file, cache_dir=tmp_path)
    generation = json.loads((folder / "generation_config.json").read_text())
    del generation["eos_token_id"], generation["bos_token_id"]
    assert generation == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }


def test_another_table_is_refused(tmp_path, tiny_gguf):
    table = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight does not have the values of"):
        convert(tmp_path, tiny_gguf, NORM | table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "bert"}, "architecture bert .* llama, qwen2, qwen3"),
        (
            {"architecture": "qwen2", "keys": {"expert_count": 8}},
            "a mixture of 8 experts is not supported for qwen2; .* are llama and qwen3moe",
        ),
        (
            {"architecture": "olmo2", "keys": {"attention.sliding_window": 128}},
            "a sliding window is not supported for olmo2",
        ),
        (
            {"keys": {"attention.sliding_window": 128, "attention.sliding_window_pattern": 6}},
            "sliding_window_pattern gives a sliding window to some layers",
        ),
        ({"keys": {"rope.dimension_count": 8}}, "rope.dimension_count 8 .* head size 16"),
        ({"keys": {"attention.head_count_kv": [2, 4]}}, "differs from layer to layer"),
        ({"tokenizer": "bert"}, "tokenizer bert is not supported; supported are gpt2"),
        ({"tokenizer": "llama"}, "a score for each token"),
        ({"pre": "command-r"}, "pre-tokenizer command-r .* smollm"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path, tiny_gguf, options, message):
    with pytest.raises(UnsupportedModel, match=rf"tiny\.gguf: .*{message}"):
        convert(tmp_path, tiny_gguf, **options)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def deepseek(tmp_path, tiny_gguf, **changes) -> ModelConfig:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return convert(tmp_path, tiny_gguf, architecture="deepseek2", keys=DEEPSEEK | keys)


def test_sizes_of_latent_attention(tmp_path, tiny_gguf):
    config = deepseek(tmp_path, tiny_gguf)
    assert config.latent == Latent(32, 16, 8, 20, None, True, 24**-0.5)
    assert config.architecture == "DeepseekV2ForCausalLM"
    assert config.layers[0].experts == Experts(8, 3, 64, False, shared_inner=64)
    older = {"attention__head_count_kv": 4, "attention__key_length": 24}
    own = {"attention__key_length_mla": None, "attention__value_length_mla": None}
    older |= {"attention__value_length": 20, "attention__q_lora_rank": 40, **own}
    config = deepseek(tmp_path, tiny_gguf, **older)
    assert config.latent == Latent(32, 16, 8, 20, 40, True, 24**-0.5)


def test_groups_that_older_converters_left_out_are_those_of_the_published_sizes(
    tmp_path, tiny_gguf
):
    v2 = deepseek(tmp_path, tiny_gguf, block_count=60, expert_count=160)
    v3 = deepseek(tmp_path, tiny_gguf, block_count=61, expert_count=256, expert_gating_func=2)
    found = [config.layers[-1].experts.groups for config in (v2, v3)]
    assert found == [ExpertGroups(8, 3), ExpertGroups(8, 4)]
    one = {"expert_group_count": 1, "expert_group_used_count": 1}
    config = deepseek(tmp_path, tiny_gguf, block_count=61, expert_count=256, **one)
    assert config.layers[-1].experts.groups is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count_kv", 2, "attention it must be 1 or head_count, 4"),
        ("attention.key_length", 40, r"must be \[48, 32\]: kv_lora_rank \+ rope"),
        ("attention.key_length_mla", 16, "less than 16, the size of a head's key"),
        ("attention.value_length_mla", None, "has only one of key_length_mla and"),
        ("attention.kv_lora_rank", None, "the GGUF file has no deepseek2.attention.kv_lora_rank"),
        ("attention.temperature_scale", 0.1, "deepseek2.attention.temperature_scale is 0.1"),
        ("attention.sliding_window", 8, "a sliding window is not supported for deepseek2"),
        ("expert_count", None, "the GGUF file has no deepseek2.expert_count"),
        ("expert_gating_func", 3, "deepseek2.expert_gating_func is 3.*2 .sigmoid"),
        ("expert_shared_count", 0, "deepseek2.expert_shared_count is 0"),
        ("expert_weights_norm", True, "deepseek2.expert_weights_norm is True.*softmax"),
        ("nextn_predict_layers", 1, "deepseek2.nextn_predict_layers is 1"),
    ],
)
def test_keys_of_deepseek_that_cannot_be_run_are_named(tmp_path, tiny_gguf, key, value, message):
    with pytest.raises(UnsupportedModel, match=message):
        convert(tmp_path, tiny_gguf, architecture="deepseek2", keys=DEEPSEEK | {key: value})
