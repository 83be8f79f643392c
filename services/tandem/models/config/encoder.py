"""Reads what config.json says of ModernBERT, an encoder: a model whose tokens attend to all others.

An encoder gives a text one state, from which an embedding or scores are computed:

    states = final_norm(layers(norm(embedding)))        [tokens, hidden]
    pooled = the first state, or the mean of all        [hidden]
    with a classification head: norm(activation(dense . pooled))

Layers with full attention alternate with layers in which a token attends to those at a distance of
at most `reach` tokens. Each kind has a RoPE frequency of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tandem.errors import UnsupportedModel
from tandem.models.config.fields import flag, number, size
from tandem.models.config.score_head import ScoreHead, read_score_head

Pooling = Literal["cls", "mean"]
Shapes = dict[str, tuple[int, ...]]
CLASSIFIER = "classifier.weight"
CLASSIFIER_BIAS = "classifier.bias"
_CLASSIFYING = "ModernBertForSequenceClassification"
ARCHITECTURES = ("ModernBertModel", "ModernBertForMaskedLM", _CLASSIFYING)
# Number of digits of a token id in the pool. Digits below 128 are exact in each dtype of KV that is
# not quantized; four of them are enough, and kernels want rows of 16 bytes.
ID_DIGITS = 8
ID_DIGIT_BITS = 7
_KINDS = {"full_attention": False, "sliding_attention": True}
_MASKED_LM = ("head.", "decoder.")  # tensors that predict masked tokens, which are not used


@dataclass(frozen=True, slots=True)
class Encoder:
    """The sizes and properties of an encoder."""

    num_heads: int
    inner: int  # size of the MLP
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    are_local: tuple[bool, ...]  # for each layer, whether attention has a reach
    reach: int
    theta: float  # RoPE of layers with full attention
    local_theta: float
    pooling: Pooling
    has_head: bool  # True: a dense layer and a norm follow the pooling
    head_bias: bool


class EncoderModel(Protocol):
    """The properties of the ModelConfig of an encoder that this module uses."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def encoder(self) -> Encoder | None: ...
    @property
    def score_head(self) -> ScoreHead | None: ...


def is_encoder(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and bool(named) and named[0] in ARCHITECTURES


def read_encoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a config.json for which `is_encoder` holds says of fields of ModelConfig. Raises
    UnsupportedModel naming the key that is not supported."""
    architecture = config["architectures"][0]
    filled = {"norm_eps": 1e-5, "local_attention": 128, **config}
    for key in ("hidden_activation", "classifier_activation"):
        if config.get(key, "gelu") != "gelu":
            raise UnsupportedModel(f"{key} is {config[key]!r:.80}; it must be gelu")
    if config.get("quantization_config"):
        raise UnsupportedModel("quantization_config is not supported for encoders")
    hidden = size(filled, "hidden_size")
    num_heads = size(filled, "num_attention_heads")
    if hidden % num_heads or hidden // num_heads % 2:
        raise UnsupportedModel(
            f"hidden_size is {hidden}; it must be a multiple of twice num_attention_heads, "
            f"{num_heads}"
        )
    is_classifier = architecture == _CLASSIFYING
    pooling = config.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise UnsupportedModel(f"classifier_pooling is {pooling!r:.80}; it must be cls or mean")
    theta, local_theta = _thetas(config)
    return {
        "architecture": architecture,
        "vocab_size": size(filled, "vocab_size"),
        "hidden_size": hidden,
        "max_model_len": size(filled, "max_position_embeddings"),
        "encoder": Encoder(
            num_heads=num_heads,
            inner=size(filled, "intermediate_size"),
            norm_eps=number(filled, "norm_eps", 1e-5),
            norm_bias=flag(config, "norm_bias"),
            attention_bias=flag(config, "attention_bias"),
            mlp_bias=flag(config, "mlp_bias"),
            are_local=_are_local(config),
            reach=size(filled, "local_attention") // 2,
            theta=theta,
            local_theta=local_theta,
            pooling=pooling if is_classifier else "mean",
            has_head=is_classifier,
            head_bias=flag(config, "classifier_bias"),
        ),
        "score_head": read_score_head(config) if is_classifier else None,
    }


def read_pooling(pooling: Mapping[str, Any], modules: object) -> Pooling:
    """Returns how the states of an embedding model are pooled, from the files of
    sentence-transformers, 1_Pooling/config.json and modules.json. Without them it is the mean.
    Raises UnsupportedModel for other ways and for further modules, which change embeddings."""
    for module in modules if isinstance(modules, list) else ():
        kind = str(module.get("type") if isinstance(module, dict) else module).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise UnsupportedModel(
                f"modules.json has the module {kind!r:.80}, which is not supported; supported are "
                "Transformer, Pooling and Normalize"
            )
    named = pooling.get("pooling_mode")
    modes = [named] if isinstance(named, str) else []
    modes += [
        key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for key, value in pooling.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    if modes in ([], ["mean"]):
        return "mean"
    if modes == ["cls"]:
        return "cls"
    raise UnsupportedModel(
        f"1_Pooling/config.json has the pooling modes {', '.join(modes)[:80]}; supported are cls "
        "or mean, one of them"
    )


def encoder_shapes(model: EncoderModel) -> Shapes:
    """Returns the shape of every tensor of an encoder, by its name without the prefix `model.`."""
    encoder, hidden = model.encoder, model.hidden_size
    assert encoder is not None
    shapes: Shapes = {"embeddings.tok_embeddings.weight": (model.vocab_size, hidden)}

    def add(name: str, shape: tuple[int, ...], *, bias: bool) -> None:
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]

    add("embeddings.norm", (hidden,), bias=encoder.norm_bias)
    add("final_norm", (hidden,), bias=encoder.norm_bias)
    for layer in range(len(encoder.are_local)):
        name = f"layers.{layer}"
        if layer:
            add(f"{name}.attn_norm", (hidden,), bias=encoder.norm_bias)
        add(f"{name}.attn.Wqkv", (3 * hidden, hidden), bias=encoder.attention_bias)
        add(f"{name}.attn.Wo", (hidden, hidden), bias=encoder.attention_bias)
        add(f"{name}.mlp_norm", (hidden,), bias=encoder.norm_bias)
        add(f"{name}.mlp.Wi", (2 * encoder.inner, hidden), bias=encoder.mlp_bias)
        add(f"{name}.mlp.Wo", (hidden, encoder.inner), bias=encoder.mlp_bias)
    if encoder.has_head:
        add("head.dense", (hidden, hidden), bias=encoder.head_bias)
        add("head.norm", (hidden,), bias=encoder.norm_bias)
    if model.score_head is not None:
        add("classifier", (len(model.score_head.labels), hidden), bias=True)
    return shapes


def is_unused(name: str, encoder: Encoder) -> bool:
    """Returns whether a checkpoint may have this tensor, although it is not read."""
    return not encoder.has_head and name.startswith(_MASKED_LM)


def _are_local(config: Mapping[str, Any]) -> tuple[bool, ...]:
    num = size(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        step = config.get("global_attn_every_n_layers", 3)
        if type(step) is not int or step < 1:
            raise UnsupportedModel(
                f"global_attn_every_n_layers is {step!r:.80}; it must be an integer of at least 1"
            )
        return tuple(bool(layer % step) for layer in range(num))
    if not isinstance(kinds, list) or len(kinds) != num or not set(map(str, kinds)) <= set(_KINDS):
        raise UnsupportedModel(
            f"layer_types is {kinds!r:.80}; it must name {' or '.join(_KINDS)} for each of {num} "
            "layers"
        )
    return tuple(_KINDS[kind] for kind in kinds)


def _thetas(config: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the RoPE frequencies of layers with full and with local attention."""
    if config.get("rope_scaling"):
        raise UnsupportedModel("rope_scaling is not supported for encoders")
    given = config.get("rope_parameters") or {}
    found = []
    for kind, old, default in (
        ("full_attention", "global_rope_theta", 160_000.0),
        ("sliding_attention", "local_rope_theta", 10_000.0),
    ):
        own = given.get(kind) if isinstance(given, dict) else None
        own = own if isinstance(own, dict) else {}
        if own.get("rope_type", "default") != "default":
            raise UnsupportedModel(
                f"rope type {own['rope_type']!r:.80} is not supported for encoders; it must be "
                "default"
            )
        found.append(number(own, "rope_theta", number(config, old, default)))
    return found[0], found[1]
