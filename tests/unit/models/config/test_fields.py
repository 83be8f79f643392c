"""Every field of a config.json changes what transformers' changes, or is refused.

Each case changes one field of a tiny checkpoint's config.json. Tandem refuses it in one line, or
its logits are those of transformers with the same files. What transformers itself refuses must not
end in anything but an answer or a refusal. `-m slow` goes through all families and all fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.errors import TandemError, UnsupportedModel
from tandem.models.config.model import ModelConfig
from tandem.models.source import read_folder
from tests.step_batches import logits_after
from tests.tiny_models import FAMILIES, make_tiny_model

PROMPT = torch.randint(0, 203, (90,), generator=torch.Generator().manual_seed(3)).tolist()
ENGINE = EngineConfig(model="", dtype="float32", kernels="torch", device="cpu", block_size=8)
GONE = object()
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# Fields that only name things, or size what is not computed with here.
LEFT_OUT = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "num_hidden_layers",
    "pad_token_id",
    # transformers limits the steps of a prompt by it, but not those of single tokens (Nemotron-H).
    "time_step_min",
    "transformers_version",
    "use_cache",
    "vocab_size",
}
# Fields of other families, each of which must be refused or mean here what transformers takes.
OTHERS: dict[str, list[Any]] = {
    "attention_bias": [True],
    "attention_multiplier": [0.3],
    "attn_logit_softcapping": [2.0],
    "decoder_sparse_step": [2],
    "embedding_multiplier": [2.0],
    "final_logit_softcapping": [3.0],
    "first_k_dense_replace": [2],
    "head_dim": [16],
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["gelu", "silu"],
    "is_causal": [False],
    "layer_types": [WINDOWS, ["full_attention"] * 3, ["linear_attention"] * 3],
    "logits_scaling": [2.0],
    "max_window_layers": [1],
    "mlp_bias": [True],
    "mlp_only_layers": [[0]],
    "model_type": ["llama", "mistral", "qwen2", "gemma2"],
    "n_group": [2],
    "no_rope_layer_interval": [2],
    "no_rope_layers": [[0, 1, 1]],
    "norm_topk_prob": [True, False],
    "num_experts": [3],
    "original_max_position_embeddings": [32],
    "partial_rotary_factor": [0.5],
    "query_pre_attn_scalar": [11],
    "residual_multiplier": [0.5],
    "rope_interleave": [True, False],
    "rope_local_base_freq": [55.0],
    "rope_parameters": [None, {"rope_theta": 77.0}, LINEAR],
    "rope_scaling": [LINEAR, YARN, None, "linear"],
    "rope_theta": [300.0],
    "routed_scaling_factor": [2.0],
    "scoring_func": ["softmax", "sigmoid"],
    "sliding_window": [40, None],
    "sliding_window_pattern": [3],
    "swiglu_alpha": [1.0],
    "swiglu_limit": [0.2],
    "tie_word_embeddings": [True, False],
    "topk_method": ["greedy", "noaux_tc"],
    "use_bidirectional_attention": [True],
    "use_sliding_window": [True, False],
}
OF_ROPES = (
    *("attention_factor", "beta_fast", "beta_slow", "factor", "low_freq_factor", "mscale"),
    *("mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor", "rope_theta"),
    *("rope_type", "truncate"),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


def changed(value: Any) -> list[Any]:
    """Returns other values than this: absent, of its type, and of types that it cannot have."""
    if isinstance(value, bool):
        return [GONE, not value, "true", None]
    if isinstance(value, int):
        return [GONE, value * 2, value + 1, value + 0.5, 0, -1, str(value), None]
    if isinstance(value, float):
        return [GONE, value * 1.5, 0.0, -value, float("inf"), str(value), None, True]
    if isinstance(value, str):
        return [GONE, "x", None, 3, []]
    if isinstance(value, list):
        return [GONE, value[::-1], value[:1], None, ["x"] * len(value), {}]
    if isinstance(value, dict):
        return [GONE, None, {}, "x"]
    return [GONE, 1, 64, True, 0.5, "x", [], {}]


def ropes_changed(ropes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    nested = [name for name, each in ropes.items() if isinstance(each, dict)]
    for name in nested or [""]:
        inner = ropes[name] if name else ropes
        for key in OF_ROPES:
            for value in changed(inner[key]) if key in inner else [0.5, 2.0, 64, None, "x"]:
                new = {k: v for k, v in (inner | {key: value}).items() if v is not GONE}
                yield ropes | {name: new} if name else new


def cases(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in config.keys() - LEFT_OUT:
        yield from ((key, value) for value in changed(config[key]))
    ropes = config.get("rope_parameters") or {}
    yield from (("rope_parameters", each) for each in ropes_changed(ropes))
    for key, values in OTHERS.items():
        yield from ((key, value) for value in values if config.get(key, GONE) != value)


def of_transformers(folder: Path) -> torch.Tensor | None:
    """Returns the logits after the prompt; None if it refuses the files."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            return model.eval()(torch.tensor([PROMPT])).logits[0, -1]
    except Exception:  # of any kind, from anywhere in it
        return None


def wrong(folder: Path, config: dict[str, Any]) -> str:
    """Returns what is wrong with the answer to a folder with this config; "" if nothing is."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        logits = logits_after(ModelRunner(read_folder(folder), ENGINE), PROMPT)
    except TandemError as error:
        is_raw = "cannot be read" in error.message or len(error.message.splitlines()) > 1
        return f"refused by {error.message!r}" if is_raw else ""
    expected = of_transformers(folder)
    if expected is None:
        return ""
    off = float((logits - expected).abs().max() / expected.abs().max())
    return "" if off < 1e-4 else f"off by {off:.3g}"


def all_wrong(family: str, folder: Path, keys: set[str] | None = None) -> list[str]:
    make_tiny_model(family, folder)
    config = json.loads((folder / "config.json").read_text())
    found = []
    for key, value in cases(config):
        if keys is None or key in keys:
            new = config | {key: value} if value is not GONE else dict(config)
            if value is GONE:
                del new[key]
            if said := wrong(folder, new):
                found.append(f"{key}={value!r:.200}: {said}")
    return found


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v2"])
def test_ropes_windows_and_ties_are_those_of_transformers_or_refused(
    family: str, tmp_path: Path
) -> None:
    keys = {"attn_logit_softcapping", "is_causal", "layer_types", "model_type", "rope_interleave"}
    keys |= {"rope_scaling", "tie_word_embeddings", "rms_norm_eps", "sliding_window"}
    assert not all_wrong(family, tmp_path, keys)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", os.environ.get("FIELDS_FAMILIES", ",".join(FAMILIES)).split(","))
def test_every_field_is_that_of_transformers_or_refused(family: str, tmp_path: Path) -> None:
    assert not all_wrong(family, tmp_path)


BASE: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "sliding_window": 64,
}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"]}
NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "layers_block_type": ["mamba"]}
DEEPSEEK = {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": False}, "is_causal is false"),
        ({"layer_types": WINDOWS}, "layer_types is .* give 3 of 3 layers a sliding window"),
        ({"model_type": "llama"}, "model_type is 'llama', which means LlamaForCausalLM"),
        (
            {"rope_parameters": LINEAR, "rope_scaling": YARN},
            "rope_parameters and rope_scaling differ",
        ),
        ({"rope_parameters": YARN | {"beta_fast": "x"}}, "beta_fast is 'x'; it must be a number"),
        ({"rope_parameters": YARN | {"factor": 0}}, "factor is 0; it must be a number > 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; it must be a number > 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; it must be a number > 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or"),
        ({"num_key_value_heads": "4"}, "num_key_value_heads is '4'; it must be a positive integer"),
        ({"head_dim": 16.5}, "head_dim is 16.5; it must be a positive integer"),
        ({"hidden_act": None}, "hidden_act is None, which is not supported"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA3 | {"rope_parameters": LINEAR}, "for this architecture, rope_parameters"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave is False"),
        (NEMOTRON | {"layer_types": ["mlp"]}, "layer_types and layers_block_type differ"),
    ],
)
def test_fields_that_would_change_answers_in_silence_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(BASE | changes)


def test_both_spellings_may_say_the_same_rope() -> None:
    both = BASE | {
        "rope_theta": 300.0,
        "rope_parameters": LINEAR | {"rope_theta": 300.0},
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    one = {key: value for key, value in both.items() if key != "rope_scaling"}
    assert ModelConfig.from_hf(both) == ModelConfig.from_hf(one)


def test_gemma_3s_ropes_by_kind_have_thetas_of_their_own_where_none_is_named() -> None:
    given = {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}
    config = ModelConfig.from_hf(BASE | GEMMA3 | {"rope_theta": 300.0, "rope_parameters": given})
    assert [layer.rope.theta for layer in config.layers] == [10000.0] * 3
    whole = ModelConfig.from_hf(
        BASE | GEMMA3 | {"rope_theta": 300.0, "rope_parameters": given, "sliding_window_pattern": 1}
    )
    assert [layer.rope.theta for layer in whole.layers] == [300.0] * 3


def test_lfm_3s_ropes_by_kind_have_one_theta_where_none_is_named(tmp_path: Path) -> None:
    make_tiny_model("lfm3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["sliding_attention"] = {"rope_type": "default"}
    del config["rope_parameters"]["full_attention"]["rope_theta"]
    layers = ModelConfig.from_hf(config).layers
    assert [layers[number].rope.theta for number in (1, 3)] == [1000000.0] * 2


def test_a_tied_output_matrix_that_differs_is_refused(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings is true, but lm_head"):
        ModelRunner(read_folder(tmp_path), ENGINE)
