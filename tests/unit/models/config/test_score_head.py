"""The head of a classification model: its labels and activation, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import UnsupportedModel
from tandem.models.config.families import FAMILIES
from tandem.models.config.score_head import _STEMS, ScoreHead, classified, decoder_of

NAMED = {"architectures": ["Qwen3ForSequenceClassification"]}


def head_of(**config: Any) -> ScoreHead:
    decoder, head = classified({**NAMED, **config})
    assert decoder["architectures"] == ["Qwen3ForCausalLM"]
    assert decoder["tie_word_embeddings"] is True
    assert head is not None
    return head


def test_each_supported_head_has_a_decoder() -> None:
    for stem in _STEMS:
        assert decoder_of(f"{stem}ForSequenceClassification") in FAMILIES
    assert decoder_of("Gemma3TextForSequenceClassification") == "Gemma3ForCausalLM"
    for other in ("Qwen3ForCausalLM", "BertForSequenceClassification", None, 7):
        assert decoder_of(other) is None


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), "softmax"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"),
        (
            {"num_labels": 1, "problem_type": "single_label_classification"},
            ("LABEL_0",),
            "sigmoid",
        ),
        (
            {
                "num_labels": 1,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ("LABEL_0",),
            "none",
        ),
        (
            {
                "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid",
            },
            ("LABEL_0", "LABEL_1"),
            "sigmoid",
        ),
    ],
)
def test_labels_and_activation(
    config: dict[str, Any], labels: tuple[str, ...], activation: str
) -> None:
    head = head_of(**config)
    assert (head.labels, head.activation) == (labels, activation)


@pytest.mark.parametrize(
    "config",
    [
        {"num_labels": 0},
        {"num_labels": True},
        {"num_labels": "3"},
        {"id2label": {}},
        {"id2label": {"0": "a", "2": "b"}},
        {"id2label": {"0": 7}},
        {"id2label": ["a"]},
        {"problem_type": "guessing"},
        {"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}},
    ],
)
def test_a_refusal_names_the_key(config: dict[str, Any]) -> None:
    name = "activation of scores" if "sentence_transformers" in config else next(iter(config))
    with pytest.raises(UnsupportedModel, match=f"{name} is"):
        head_of(**config)


def test_another_config_is_unchanged() -> None:
    config = {"architectures": ["Qwen3ForCausalLM"]}
    assert classified(config) == (config, None)
