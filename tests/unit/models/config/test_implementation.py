"""Which code computes a model, and which models transformers is not given."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.config import implementation
from tandem.models.config.from_transformers import read_sizes
from tandem.models.config.implementation import read_model_config

_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 203,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "eos_token_id": 2,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def test_auto_takes_transformers_for_an_architecture_without_a_family() -> None:
    config = read_model_config(_GPT2, {"eos_token_id": [5]}, "auto")
    assert config.implementation == "transformers"
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (2, 4, 16)
    assert (config.max_model_len, config.eos_token_ids) == (512, (5, 2))
    assert read_model_config(_LLAMA, None, "auto").implementation == "tandem"
    assert read_model_config(_LLAMA, None, "transformers").implementation == "transformers"


def test_tandem_alone_refuses_an_architecture_without_a_family() -> None:
    with pytest.raises(UnsupportedModel, match="architecture GPT2LMHeadModel is not supported"):
        read_model_config(_GPT2, None, "tandem")


def test_messages_name_the_extra_if_transformers_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(implementation, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel .*tandem-llm\[transformers\]"):
        read_model_config(_GPT2, None, "auto")
    with pytest.raises(ConfigError, match=r"install tandem-llm\[transformers\]"):
        read_model_config(_LLAMA, None, "transformers")
    assert read_model_config(_LLAMA, None, "auto").implementation == "tandem"


def test_the_childs_refusal_is_raised() -> None:
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM is not supported: ALiBi"):
        read_model_config(_bloom(), None, "auto")


def _bloom() -> dict[str, Any]:
    return {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 203}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_bloom(), "BloomForCausalLM is not supported: ALiBi"),
        ({"model_type": "mpt"}, "MptForCausalLM is not supported: ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "FalconForCausalLM with alibi is not"),
        ({"model_type": "t5"}, "transformers has no decoder"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "it is an encoder-decoder"),
        ({"model_type": "deepseek_v3"}, "DeepseekV3ForCausalLM with kv_lora_rank"),
        ({"model_type": "qwen3_next"}, "layer_types has 'linear_attention'"),
        ({"model_type": "none"}, "does not know the model_type 'none'"),
        (
            {"model_type": "none", "auto_map": {"AutoModelForCausalLM": "code.Own"}},
            r"auto_map is \{'AutoModelForCausalLM': 'code.Own'\}: .* never run",
        ),
        (_GPT2 | {"architectures": ["GPT2Model"]}, "it must be .*GPT2LMHeadModel"),
        (_GPT2 | {"n_layer": 0}, "num_hidden_layers is 0; it must be a positive integer"),
        (_GPT2 | {"n_layer": "many"}, "transformers cannot read the config: .*n_layer"),
        (_LLAMA | {"quantization_config": {"quant_method": "awq"}}, "with quantization_config"),
        (_LLAMA | {"num_nextn_predict_layers": 1}, r"multi-token prediction \(MTP\)"),
        (
            _LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' is not supported",
        ),
        (
            _LLAMA
            | {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "original_max_position_embeddings": 256,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                }
            },
            "rope type 'longrope' is not supported",
        ),
    ],
)
def test_refusals_name_their_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_sizes(config)


def test_windows_and_chunks_are_sizes_of_layers() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = {
        **_LLAMA,
        "model_type": "cohere2",
        "architectures": ["Cohere2ForCausalLM"],
        "layer_types": kinds,
    }
    assert read_sizes(config | {"sliding_window": 100})["windows"] == [100, None]
    # A window of the whole context hides nothing.
    assert read_sizes(config | {"sliding_window": 512})["windows"] == [None, None]
