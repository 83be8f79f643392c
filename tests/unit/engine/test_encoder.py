"""ModernBERT in an engine: embeddings and scores as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertModel,
)

from tandem.common.config.engine import EngineOptions
from tandem.engine.engine import Engine
from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.checkpoint.check_encoder import check_encoder
from tandem.models.folder import ModelFolder
from tandem.models.limits import check_settings
from tandem.models.scoring import read_scorer
from tandem.models.source import read_folder
from tandem.models.tokenizer.tokenizer import Tokenizer
from tests.engine_driver import drive_all, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import character_tokenizer

PROMPTS = [[5, 9, 5, 17, 300, *range(60)], [7], [8, *range(30)], [5, 9, 5, 17, 300, *range(40)]]


def make_encoder(kind: type[Any], path: Path, **more: Any) -> tuple[ModelFolder, Any]:
    """Writes a tiny random ModernBERT. Its token ids need two digits in the pool."""
    torch.manual_seed(7)
    sizes = {"vocab_size": 400, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 4}
    own = {"num_attention_heads": 4, "max_position_embeddings": 256, "local_attention": 16}
    ids = {f"{name}_token_id": None for name in ("pad", "bos", "eos", "cls", "sep")}
    model = kind(ModernBertConfig(**sizes, **own, **ids, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(character_tokenizer().to_str())
    return read_folder(path), model


def make(folder: ModelFolder, **settings: Any) -> Engine:
    settings = {"block_size": 4, "num_blocks": 128, "max_model_len": 128, **settings}
    return make_model_engine(folder, **{"dtype": "float32", "max_num_seqs": 5, **settings})[0]


def states(engine: Engine, prefix: str = "") -> list[list[float]]:
    specs = [make_spec(f"{prefix}{n}", p, max_tokens=1, embed=True) for n, p in enumerate(PROMPTS)]
    ends = drive_all(engine, *specs).ends
    engine.check_integrity()
    return [ends[f"{prefix}{index}"].embedding for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (ModernBertModel, {}),
        (ModernBertForMaskedLM, {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
        (ModernBertModel, {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ],
)
def test_embeddings_are_transformers(tmp_path: Path, kind: type[Any], more: Any) -> None:
    """Prompts in chunks and from the cache; their tokens attend to later ones all the same."""
    folder, reference = make_encoder(kind, tmp_path, **more)
    layers = reference if kind is ModernBertModel else reference.model
    engine = make(folder, max_tokens_per_step=24)
    for prefix in ("first-", "again-"):
        for prompt, state in zip(PROMPTS, states(engine, prefix), strict=True):
            with torch.inference_mode():
                expected = layers(torch.tensor([prompt])).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(state, expected.numpy(), atol=1e-4)


def test_the_first_state_is_taken_if_the_files_say_so(tmp_path: Path) -> None:
    make_encoder(ModernBertModel, tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    folder = read_folder(tmp_path)
    reference = ModernBertModel.from_pretrained(tmp_path).eval()
    for prompt, state in zip(PROMPTS, states(make(folder)), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).last_hidden_state[0, 0]
        np.testing.assert_allclose(state, expected.numpy(), atol=1e-4)
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UnsupportedModel, match="pooling modes max"):
        read_folder(tmp_path)
    file.unlink()
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.Dense"}]))
    with pytest.raises(UnsupportedModel, match="the module 'Dense'"):
        read_folder(tmp_path)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_are_transformers(tmp_path: Path, pooling: str, num_labels: int) -> None:
    more = {"classifier_pooling": pooling, "num_labels": num_labels, "classifier_bias": True}
    folder, reference = make_encoder(ModernBertForSequenceClassification, tmp_path, **more)
    scorer = read_scorer(folder, Tokenizer.of(folder), "auto")
    assert scorer is not None
    for prompt, state in zip(PROMPTS, states(make(folder)), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt])).logits[0]
        found = scorer.scores(state, are_activated=False)
        np.testing.assert_allclose(found, logits.numpy(), atol=1e-4)
        expected = torch.sigmoid(logits) if num_labels == 1 else torch.softmax(logits, -1)
        np.testing.assert_allclose(scorer.scores(state), expected.numpy(), atol=1e-4)


def test_ids_are_exact_in_16_bits(tmp_path: Path) -> None:
    folder, _ = make_encoder(ModernBertModel, tmp_path)
    chunks = {"dtype": "bfloat16", "max_tokens_per_step": 8}
    assert states(make(folder, **chunks)) == states(make(folder, dtype="bfloat16"))


@pytest.mark.parametrize(
    "setting",
    [
        {"kv_dtype": "int8"},
        {"kernels": "native"},
        {"weights": "int8"},
        {"numerics": "invariant"},
        {"tensor_parallel": 2},
    ],
)
def test_settings_of_decoders_are_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    folder, _ = make_encoder(ModernBertModel, tmp_path)
    with pytest.raises(ConfigError, match="ModernBertModel is an encoder, which does not support"):
        check_settings(EngineOptions(**setting), folder.config)


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    folder, _ = make_encoder(ModernBertModel, tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    for change, says in (
        ({"layers.1.attn.Wo.weight": None}, "lacks layers.1.attn.Wo.weight"),
        ({"layers.1.attn.Wo.bias": torch.zeros(48)}, "has layers.1.attn.Wo.bias"),
        ({"final_norm.weight": torch.zeros(47)}, r"has shape \[47\]"),
    ):
        changed = {n: t for n, t in {**whole, **change}.items() if t is not None}
        save_file(changed, file)
        with pytest.raises(UnsupportedModel, match=says):
            check_encoder(folder.weight_files, folder.config)
