"""PEFT's folders: which modules they change and how much, and everything that is refused."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.common.process import bounded_child
from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.config.experts import Experts
from tandem.models.config.latent import Latent
from tandem.models.config.model import ModelConfig
from tandem.models.lora.adapter import WEIGHTS_FILE, open_lora, read_modules
from tests.lora_adapters import _DEFAULTS, ALL, write_adapter

_HF = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
MODEL = ModelConfig.from_hf(_HF)


def modules_of(**settings: Any) -> dict[str, tuple[int, float]]:
    """Returns rank and scale of what an adapter changes, by the short names of the modules."""
    found = read_modules(_DEFAULTS | settings, MODEL)
    return {
        name.removeprefix("model.layers."): (module.rank, module.scale)
        for name, module in found.items()
    }


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"target_modules": ["v_proj"]}, {f"{i}.self_attn.v_proj" for i in range(3)}),
        ({"target_modules": ["0.mlp.up_proj"]}, {"0.mlp.up_proj"}),
        (
            {"target_modules": r"model.*2\.mlp\.(up|down)_proj"},
            {"2.mlp.up_proj", "2.mlp.down_proj"},
        ),
        (
            {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [2]},
            {"2.self_attn.q_proj", "2.self_attn.k_proj"},
        ),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
            {"1.self_attn.q_proj"},
        ),
        (
            {"target_modules": ["q_proj"], "exclude_modules": ["0.self_attn.q_proj"]},
            {"1.self_attn.q_proj", "2.self_attn.q_proj"},
        ),
        (
            {"target_modules": ["q_proj"], "exclude_modules": r".*\.(0|1)\..*"},
            {"2.self_attn.q_proj"},
        ),
    ],
)
def test_targets_are_those_of_peft(settings: dict[str, Any], names: set[str]) -> None:
    assert modules_of(**settings).keys() == names


def test_layers_with_experts_have_no_other_matrices() -> None:
    """An adapter that names other matrices is refused; they are not left out."""
    experts = replace(MODEL.layers[0], experts=Experts(4, 2, 8, True))
    model = replace(MODEL, layers=(experts, *MODEL.layers[1:]))
    found = read_modules(_DEFAULTS | {"target_modules": "all-linear"}, model)
    assert "model.layers.1.mlp.up_proj" in found
    assert "model.layers.0.self_attn.o_proj" in found
    assert "model.layers.0.mlp.up_proj" not in found
    only = replace(MODEL, layers=(experts,))
    with pytest.raises(UnsupportedModel, match=r"target_modules has 'up_proj'.*o_proj"):
        read_modules(_DEFAULTS | {"target_modules": ["up_proj"]}, only)


def test_latent_attention_has_adapters_of_all_its_matrices() -> None:
    for q_rank, queries in ((None, ("q_proj",)), (28, ("q_a_proj", "q_b_proj"))):
        model = replace(MODEL, latent=Latent(40, 8, 24, 20, q_rank, True, 0.2))
        found = read_modules(_DEFAULTS | {"target_modules": "all-linear"}, model)
        names = {name.rpartition(".")[2] for name in found if "self_attn" in name}
        assert names == {*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


def test_of_a_layer_with_experts_the_shared_mlp_has_adapters() -> None:
    experts = Experts(4, 2, 24, True, shared_inner=20)
    first, *others = MODEL.layers
    model = replace(MODEL, layers=(first, *(replace(each, experts=experts) for each in others)))
    found = read_modules(_DEFAULTS | {"target_modules": ["up_proj", "down_proj"]}, model)
    names = {name.removeprefix("model.layers.") for name in found}
    shared = {f"{i}.mlp.shared_experts.{part}_proj" for i in (1, 2) for part in ("up", "down")}
    assert names == {"0.mlp.up_proj", "0.mlp.down_proj", *shared}
    alone = replace(experts, shared_inner=0)
    model = replace(MODEL, layers=tuple(replace(each, experts=alone) for each in MODEL.layers))
    with pytest.raises(UnsupportedModel, match="'up_proj', which is not supported"):
        read_modules(_DEFAULTS | {"target_modules": ["up_proj"]}, model)


HYBRID = ModelConfig.from_hf(
    _HF
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 40,
        "num_local_experts": 0,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    }
)


def test_modules_of_layers_with_states_have_the_names_of_checkpoints() -> None:
    settings = {"target_modules": ["in_proj", "output_linear"], "layers_to_transform": [1, 2]}
    patterns = {"rank_pattern": {"2.mamba.in_proj": 3}}
    found = read_modules(_DEFAULTS | settings | patterns, HYBRID)
    assert {name: module.rank for name, module in found.items()} == {
        "model.layers.2.linear_attn.in_proj": 3,
        "model.layers.1.mlp.down_proj": 8,
        "model.layers.2.mlp.down_proj": 8,
    }
    expression = {"target_modules": r".*\.mamba\.out_proj"}
    assert list(read_modules(_DEFAULTS | expression, HYBRID)) == [
        "model.layers.0.linear_attn.out_proj",
        "model.layers.2.linear_attn.out_proj",
    ]
    for target in (["conv1d"], r".*\.(conv1d|in_proj)"):
        with pytest.raises(UnsupportedModel, match=r"conv1d.*, which is not supported; supported"):
            read_modules(_DEFAULTS | {"target_modules": target}, HYBRID)


def test_an_adapter_of_a_layer_with_a_state_is_read_by_its_names(tmp_path: Path) -> None:
    targets = ["in_proj", "out_proj", "input_linear"]
    write_adapter(tmp_path, HYBRID, target_modules=targets)
    stored = load_file(tmp_path / WEIGHTS_FILE)
    assert "base_model.model.model.layers.0.mamba.in_proj.lora_A.weight" in stored
    folder = open_lora(str(tmp_path), HYBRID, rank_max=8)
    assert len(folder.modules) == 7
    assert all(name in stored for names in folder.tensors.values() for name in names)


def test_all_linear_is_all_but_the_output() -> None:
    found = modules_of(target_modules="all-linear")
    assert len(found) == 3 * 7
    assert {name.rpartition(".")[2] for name in found} == set(ALL)


def test_ranks_and_scales_have_patterns() -> None:
    found = modules_of(
        target_modules=["q_proj", "up_proj"],
        r=8,
        lora_alpha=16,
        rank_pattern={"up_proj": 4, r"layers\.1\.self_attn\.q_proj": 2},
        alpha_pattern={"^model.layers.2.mlp.up_proj": 2},
    )
    assert found["0.self_attn.q_proj"] == (8, 2.0)
    assert found["1.self_attn.q_proj"] == (2, 8.0)
    assert found["0.mlp.up_proj"] == (4, 4.0)
    assert found["2.mlp.up_proj"] == (4, 0.5)
    assert modules_of(r=4, lora_alpha=8, use_rslora=True)["0.self_attn.q_proj"] == (4, 4.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow is 1"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"target_modules": ["fc1"]}, "target_modules has 'fc1'.*q_proj"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head'"),
        ({"target_modules": ["embed_tokens"]}, "target_modules has 'embed_tokens'"),
        ({"target_modules": ".*(q_proj|lm_head)"}, "target_modules has lm_head"),
        ({"target_modules": "nothing"}, "names no module"),
        ({"target_modules": None}, "target_modules is None"),
        (
            {"layers_to_transform": [0], "layers_pattern": "blocks"},
            r"layers_pattern is \['blocks'\]; it must be \"layers\"",
        ),
        (
            {"layers_to_transform": [3, 4]},
            r"layers_to_transform is \[3, 4\], but none .* with such a module: from 0 to 2",
        ),
        (
            {"layers_to_transform": [0], "layers_pattern": "(layers|h)"},
            r"layers_pattern is .*; it must be \"layers\"",
        ),
        (
            {"layers_to_transform": [0], "target_modules": ".*lm_head"},
            r"layers_to_transform is \[0\], but none of these .* with such a module: none",
        ),
        ({"exclude_modules": [*ALL]}, "exclude_modules .* excludes every module"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform is"),
        ({"r": 0}, "rank of .* is 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha .* is nan"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_modules(_DEFAULTS | settings, MODEL)


def test_a_folder_is_checked_before_its_weights_are_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL, r=4, target_modules=["q_proj", "down_proj"])
    folder = open_lora(str(tmp_path), MODEL, rank_max=4)
    assert folder.rank == 4
    assert len(folder.modules) == 6
    with pytest.raises(UnsupportedModel, match=r"rank 4; max-lora-rank allows at most 3"):
        open_lora(str(tmp_path), MODEL, rank_max=3)


def test_the_digest_is_of_both_files(tmp_path: Path) -> None:
    def digest() -> str:
        folder = open_lora(str(tmp_path), MODEL, rank_max=64)
        assert folder.read_weights()[1] == folder.digest()
        return folder.digest()

    write_adapter(tmp_path, MODEL)
    first = digest()
    write_adapter(tmp_path, MODEL)
    assert digest() == first
    write_adapter(tmp_path, MODEL, seed=2)
    assert digest() != first
    write_adapter(tmp_path, MODEL, lora_alpha=17)
    assert digest() != first


def _change(path: Path, **changed: torch.Tensor | None) -> None:
    tensors = load_file(path / WEIGHTS_FILE)
    for name, tensor in changed.items():
        name = "base_model.model.model.layers.0." + name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / WEIGHTS_FILE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"self_attn__q_proj__lora_A__weight": None}, "lacks .*layers.0.self_attn.q_proj.lora_A"),
        (
            {"mlp__up_proj__lora_A__weight": torch.ones(8, 32)},
            "the adapter has .*up_proj.lora_A.weight",
        ),
        ({"self_attn__q_proj__lora_A__weight": torch.ones(8, 31)}, r"shape \[8, 31\].*\[8, 32\]"),
        ({"self_attn__q_proj__lora_B__weight": torch.ones(32, 7)}, r"has shape \[32, 7\]"),
        (
            {"self_attn__q_proj__lora_A__weight": torch.ones(8, 32, dtype=torch.int32)},
            "has type I32",
        ),
        ({"self_attn__q_proj__lora_magnitude_vector": torch.ones(32)}, "lora_magnitude_vector"),
    ],
)
def test_tensors_must_be_those_of_the_config(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, MODEL)
    _change(tmp_path, **changed)
    with pytest.raises(UnsupportedModel, match=message):
        open_lora(str(tmp_path), MODEL, rank_max=64)


def test_names_with_the_adapters_own_are_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    renamed = {n.replace(".weight", ".default.weight"): t for n, t in tensors.items()}
    save_file(renamed, tmp_path / WEIGHTS_FILE)
    folder = open_lora(str(tmp_path), MODEL, rank_max=64)
    a, _ = folder.tensors["model.layers.0.self_attn.q_proj"]
    assert a == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"target_modules": ["q_proj", "wq"]},
            "has 'wq', which is not supported: this model has no",
        ),
        ({"target_modules": ["lm_head"]}, "has 'lm_head', which is not supported; supported are"),
        ({"target_modules": ".*wq"}, "target_modules '.*wq' names no module of this model, which"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern is \['q_proj'\]; it must be an object"),
        ({"alpha_pattern": "x"}, "alpha_pattern is 'x'; it must be an object"),
        ({"exclude_modules": 5}, "exclude_modules is 5; it must be a pattern"),
    ],
)
def test_a_module_that_the_model_lacks_and_a_field_of_a_wrong_type_are_named(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedModel, match=says) as raised:
        modules_of(**settings)
    assert len(raised.value.message.splitlines()) == 1


@pytest.mark.parametrize("place", ["language_model.model.", "model.language_model.", "model."])
def test_an_adapter_of_a_multimodal_model(place: str, tmp_path: Path) -> None:
    """PEFT names the tensors as the whole model does."""
    write_adapter(tmp_path, MODEL, target_modules=["q_proj"])
    file = tmp_path / WEIGHTS_FILE
    wanted = open_lora(str(tmp_path), MODEL, rank_max=64)
    named = {
        name.replace("base_model.model.model.", f"base_model.model.{place}"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(named, file)
    found = open_lora(str(tmp_path), replace(MODEL, is_text_part=True), rank_max=64)
    assert found.modules == wanted.modules
    assert {name for pair in found.tensors.values() for name in pair} == named.keys()


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} has no adapter_config.json"):
        open_lora(str(tmp_path), MODEL, rank_max=64)
    write_adapter(tmp_path, MODEL)
    weights = (tmp_path / WEIGHTS_FILE).read_bytes()
    for broken in (weights[:-1], b"", weights[:50], b"\xff" * 100):
        (tmp_path / WEIGHTS_FILE).write_bytes(broken)
        with pytest.raises(ConfigError, match=f"{tmp_path / WEIGHTS_FILE}"):
            open_lora(str(tmp_path), MODEL, rank_max=64)
    (tmp_path / WEIGHTS_FILE).unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="save the adapter as safetensors"):
        open_lora(str(tmp_path), MODEL, rank_max=64)
    (tmp_path / WEIGHTS_FILE).write_bytes(weights)
    for text in ("", "[]", json.dumps({"peft_type": "LORA", "target_modules": "("})):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(ConfigError, match=f"{tmp_path / 'adapter_config.json'}"):
            open_lora(str(tmp_path), MODEL, rank_max=64)


EVIL = "([a-z]+|[a-z_.0-9]+)+!"
EVIL_CONFIGS = [
    {"rank_pattern": {"q_proj": 4, EVIL: 4}},
    {"alpha_pattern": {EVIL: 4}},
    {"target_modules": EVIL},
    {"exclude_modules": EVIL},
    {"layers_to_transform": [0], "layers_pattern": ["([a-z_.0-9]+)+!"]},
    {"target_modules": f"(?=({EVIL}))x"},
]


def assert_cannot_be_matched(config: dict[str, Any]) -> None:
    field = next(name for name in config if "pattern" in name or "modules" in name)
    with pytest.raises(UnsupportedModel, match=rf"{field} has '.*\+.*cannot be matched in 1 s"):
        modules_of(**config)


@pytest.mark.parametrize(
    "config",
    [EVIL_CONFIGS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in EVIL_CONFIGS[1:])],
    ids=lambda config: next(iter(config)),
)
def test_an_expression_that_never_ends_is_named(config: dict[str, Any]) -> None:
    """It would hold the interpreter, so that nothing else of the worker runs."""
    assert_cannot_be_matched(config)


@pytest.mark.parametrize("config", EVIL_CONFIGS[1:], ids=lambda config: next(iter(config)))
def test_expressions_of_each_field_are_matched_in_the_bounded_process_only(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the process is one that was ended at once. To match one outside of it never ends."""
    told: list[bytes] = []

    def ended(_command: object, given: bytes, **_bounds: object) -> tuple[bytes, int]:
        told.append(given)
        return b"", -signal.SIGXCPU

    monkeypatch.setattr(bounded_child, "run_bounded", ended)
    assert_cannot_be_matched(config)
    assert len(told) == 1


def test_an_expression_that_is_none_is_named() -> None:
    for wrong in ("q_proj(", "(" * 5000, "a{99999999999}"):
        with pytest.raises(
            UnsupportedModel, match=r"rank_pattern has .* is not a valid regular expression"
        ):
            modules_of(rank_pattern={wrong: 4})


def test_expressions_mean_what_they_mean_to_peft() -> None:
    """The first pattern that matches counts, whether it is plain or not."""
    ranks = modules_of(rank_pattern={r"layers\.0\..*": 2, "q_proj": 3, r"[kv]_proj": 4}, r=8)
    assert {name: rank for name, (rank, _) in ranks.items() if "_proj" in name}.items() >= {
        ("0.self_attn.q_proj", 2),
        ("1.self_attn.q_proj", 3),
        ("1.self_attn.v_proj", 4),
    }
    excluded = modules_of(exclude_modules=r".*\.1\..*", target_modules="all-linear")
    assert {name[0] for name in excluded} == {"0", "2"}
    chosen = modules_of(layers_to_transform=[1], layers_pattern=["blocks", "laye.s"])
    assert {name[0] for name in chosen} == {"1"}


def test_a_config_that_is_too_large_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL, target_modules=["q_proj"] * 200_000)
    with pytest.raises(ConfigError, match="larger than the 1048576 bytes"):
        open_lora(str(tmp_path), MODEL, rank_max=64)
