"""Reads what config.json says of a classification head: the labels, and how logits become scores.

transformers' classes `...ForSequenceClassification` of decoders have one matrix, `score`, in place
of the output matrix. It multiplies the hidden state of the last token after the final norm:

    logits = score . state      [labels] = [labels, hidden] . [hidden]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.errors import UnsupportedModel

SCORE = "score.weight"  # name of the head's matrix in checkpoints
_SUFFIX = "ForSequenceClassification"
# Beginnings of the names of the classes whose head is as the drawing of this module says.
_STEMS = (
    *("DeepseekV2", "DeepseekV3", "Exaone4", "Gemma2", "Gemma3Text", "Glm", "Glm4", "GptOss"),
    *("HunYuanDenseV1", "HunYuanMoEV1", "Llama", "Ministral3", "Mistral", "Mistral4", "Mixtral"),
    *("Olmo2", "Olmo3", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5Text"),
    *("SeedOss", "SmolLM3"),
)
_LABELS_MAX = 4096
# How logits become scores: they sum to 1, each is from 0 to 1, or they stay as they are.
Activation = Literal["softmax", "sigmoid", "none"]
_BY_PROBLEM: Mapping[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# Activations that cross-encoders of sentence-transformers name.
_BY_CLASS: Mapping[str, Activation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "none",
}


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """The head of a model that scores texts instead of continuing them."""

    labels: tuple[str, ...]  # name of each row of the matrix
    activation: Activation


def decoder_of(architecture: object) -> str | None:
    """Returns the decoder, such as Qwen3ForCausalLM, below a supported classification model, such
    as Qwen3ForSequenceClassification. Returns None for any other architecture."""
    stem = str(architecture).removesuffix(_SUFFIX)
    if stem == architecture or stem not in _STEMS:
        return None
    return f"{stem.removesuffix('Text')}ForCausalLM"


def classified(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ScoreHead | None]:
    """Splits the config.json of a classification model into that of its decoder and its head.

    Returns any other config unchanged, with None. The decoder has no output matrix of its own, so
    its embedding takes the place: tokens are never sampled from it for an answer. Raises
    UnsupportedModel naming the key that is not supported.
    """
    named = config.get("architectures")
    decoder = decoder_of(named[0]) if isinstance(named, list) and named else None
    if decoder is None:
        return config, None
    plain = {**config, "architectures": [decoder], "tie_word_embeddings": True}
    return plain, read_score_head(config)


def read_score_head(config: Mapping[str, Any]) -> ScoreHead:
    """Reads the head of any classification model. Raises UnsupportedModel."""
    labels = _labels(config)
    return ScoreHead(labels, _activation(config, len(labels)))


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label")
    if names is None:
        num = config.get("num_labels", 2)  # transformers' default
        if type(num) is not int or not 0 < num <= _LABELS_MAX:
            raise UnsupportedModel(
                f"num_labels is {num!r:.80}; it must be an integer from 1 to {_LABELS_MAX}"
            )
        return tuple(f"LABEL_{index}" for index in range(num))
    if not isinstance(names, dict) or not 0 < len(names) <= _LABELS_MAX:
        raise UnsupportedModel(
            f"id2label is {names!r:.80}; it must be an object with the names of 1 to "
            f"{_LABELS_MAX} labels"
        )
    found = [names.get(str(index)) for index in range(len(names))]
    if not all(isinstance(name, str) for name in found):
        raise UnsupportedModel(
            f"id2label is {names!r:.80}; its keys must be the numbers from 0 on, and its values "
            "strings"
        )
    return tuple(map(str, found))


def _activation(config: Mapping[str, Any], num_labels: int) -> Activation:
    """Returns the activation that vLLM would choose."""
    problem = config.get("problem_type")
    if problem is not None and problem not in _BY_PROBLEM:
        raise UnsupportedModel(
            f"problem_type is {problem!r:.80}, which is not supported; supported are "
            f"{', '.join(_BY_PROBLEM)}"
        )
    if problem is not None and (problem != "single_label_classification" or num_labels > 1):
        return _BY_PROBLEM[problem]
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None and named not in _BY_CLASS:
        raise UnsupportedModel(
            f"the activation of scores is {named!r:.80}, which is not supported; supported are "
            f"{', '.join(_BY_CLASS)}"
        )
    if named is not None:
        return _BY_CLASS[named]
    return "softmax" if num_labels > 1 else "sigmoid"
