"""Reads a model's sizes and properties from config.json of the model's Hugging Face folder.

This module does not read weights or import torch. A model that the engine cannot compute exactly
raises UnsupportedModel, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tandem.common.dtypes import IndexKeys
from tandem.errors import UnsupportedModel
from tandem.models.config.deepseek_v4 import (
    SharedKv,
    Streams,
    read_shared_kv,
    read_streams,
    with_deepseek_v4_layers,
    with_plain_keys,
)
from tandem.models.config.encoder import Encoder
from tandem.models.config.experts import has_experts
from tandem.models.config.falcon_h1 import LayerFactors, read_layer_factors
from tandem.models.config.families import FAMILIES, ExpertForm, Family, Norms, QkNorm
from tandem.models.config.fields import flag, number, optional_number, optional_size, size
from tandem.models.config.gemma3n import (
    AltUp,
    largest_inner,
    read_alt_up,
    with_gemma3n_layers,
)
from tandem.models.config.gemma4 import (
    PerLayerInputs,
    read_per_layer_inputs,
    with_gemma4_layers,
)
from tandem.models.config.kimi_linear import with_kimi_layers
from tandem.models.config.latent import Latent, read_latent
from tandem.models.config.layers import (
    Heads,
    LayerSpec,
    check_kinds,
    kinds_of_pattern,
    read_layers,
)
from tandem.models.config.quantization import has_kv_scales, read_quantization
from tandem.models.config.quantization_scheme import Quantization
from tandem.models.config.rope import read_ropes
from tandem.models.config.score_head import ScoreHead, classified
from tandem.models.config.text_part import names_in_model, text_config

Activation = Literal["silu", "gelu_tanh", "relu2"]
Implementation = Literal["tandem", "transformers", "encoder"]
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Activations of MLPs without gates.
_UNGATED: Mapping[str, Activation] = {"relu2": "relu2"}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constant factors in a decoder."""

    embedding: float = 1.0
    attention: float | None = None  # factor on q . k; None: 1 / sqrt(head_dim)
    residual: float = 1.0  # factor on the outputs of attention and the MLP
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class GateClamp:
    """Clamped SwiGLU: g * sigmoid(alpha * g) * (u + offset). The gate g is clamped to at most
    `limit`, and the up projection u is clamped to [-limit, limit]."""

    alpha: float
    limit: float
    offset: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and properties of a decoder model. Such a model has RMSNorm, grouped-query or
    latent attention, and gated MLPs or experts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    num_attention_heads: int
    num_kv_heads: int  # 1 with latent attention: all heads share the latent and the rotated key
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm  # RMSNorm of q and k (`Family`)
    max_model_len: int  # largest number of tokens of a prompt and its completion together
    eos_token_ids: tuple[int, ...]
    torch_dtype: str  # dtype of the checkpoint; the engine chooses its own compute dtype
    norms: Norms = "before"
    norm_offset: float = 0.0  # number that is added to the stored weights of norms
    # True: norms of the residual stream are LayerNorms without biases, not RMSNorms.
    centers_norms: bool = False
    activation: Activation = "silu"  # function that is applied to the gate projection of the MLP
    multipliers: Multipliers = Multipliers()
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap)
    attention_cap: float | None = None  # attention scores become cap * tanh(scores / cap)
    # True: each head has an attention sink, a learned score that the head's softmax includes.
    has_sinks: bool = False
    # Clamped SwiGLU, which is used instead of `activation`. None: `activation` is used.
    gate_clamp: GateClamp | None = None
    layer_factors: LayerFactors | None = None  # Falcon-H1's factors on products; None: no factors
    is_mxfp4: bool = False  # True: experts are in MXFP4 (32 numbers of 4 bits share a scale).
    expert_form: ExpertForm = ""  # naming scheme of the experts' tensors
    # Quantization scheme of each matrix. None: all matrices are stored in `torch_dtype`.
    quantization: Quantization | None = None
    has_kv_scales: bool = False  # True: the checkpoint has static scales for KV in fp8_e4m3.
    has_fused_qkv: bool = False  # True: checkpoints store q, k and v as one matrix.
    has_fused_mlp: bool = False  # True: checkpoints store gate and up as one matrix.
    # True: some checkpoints store gate and up as one matrix; the names of their tensors tell.
    may_fuse_mlp: bool = False
    # True: checkpoints store two elements that RoPE rotates together side by side.
    has_rope_pairs: bool = False
    # Part of a tensor's name in checkpoints -> the part that stands there in this package.
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    latent: Latent | None = None  # sizes of latent attention; None: grouped-query attention
    # Sizes of attention with one KV head whose keys are its values. None: values are not keys.
    shared_kv: SharedKv | None = None
    streams: Streams | None = None  # None: the residual stream is one stream.
    has_attention_gates: bool = False  # True: attention's output is multiplied by sigmoid(gate).
    has_head_gates: bool = False  # True: each head's output is multiplied by sigmoid(gate).
    value_dim: int | None = None  # number of elements of a head's value; None: as of its key
    value_scale: float = 1.0  # factor on values
    has_value_norms: bool = False  # True: values are normalized, without weights.
    has_layer_scalars: bool = False  # True: the output of each layer is multiplied by a number.
    per_layer_inputs: PerLayerInputs | None = None  # None: tokens have no embeddings for layers
    alt_up: AltUp | None = None  # None: the residual stream has no copies.
    # Number of layers in the checkpoint for multi-token prediction. Tandem does not run them.
    num_extra_layers: int = 0
    # True: the model is the text part of a multimodal checkpoint (text_part.py).
    is_text_part: bool = False
    # The head of a classification model. None: the model continues texts.
    score_head: ScoreHead | None = None
    # None: the model is a decoder. An encoder keeps no KV: the pool has the ids of its tokens, as
    # if they were the keys of one layer.
    encoder: Encoder | None = None
    # Code that computes the model. With "transformers" (from_transformers.py) and "encoder", the
    # fields that only Tandem's own decoders use keep their defaults.
    implementation: Implementation = "tandem"

    @property
    def generates(self) -> bool:
        """True if the model continues texts."""
        return self.score_head is None and self.encoder is None

    @property
    def embeds(self) -> bool:
        """True if the state of a text is an embedding. That of an encoder with a head is not: it is
        made for the head alone."""
        return self.score_head is None or self.encoder is None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state."""
        return any(layer.linear is not None for layer in self.layers)

    @property
    def index_keys(self) -> IndexKeys | None:
        """The keys of indexers in a token's KV; None if no layer has an indexer."""
        dims = [layer.indexer.dim for layer in self.layers if layer.indexer is not None]
        return IndexKeys(len(dims), dims[0]) if dims else None

    @property
    def attention_scale(self) -> float:
        """Factor on q . k."""
        if self.latent is not None:
            return self.latent.scale
        given = self.multipliers.attention
        return self.head_dim**-0.5 if given is None else given

    @property
    def rope_dim(self) -> int:
        """Number of elements of a head that RoPE may rotate."""
        if self.shared_kv is not None:
            return self.shared_kv.rope_dim
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def num_qkv(self) -> int:
        """Number of elements of the queries, keys and values of a token, of all heads."""
        return (self.num_attention_heads + 2 * self.num_kv_heads) * self.head_dim

    def for_contexts(self, max_model_len: int) -> ModelConfig:
        """Returns the config for serving contexts of at most `max_model_len` tokens.

        The maximum matters only for RoPE scaling of the kind longrope, which has short factors for
        short contexts and long factors for long ones. transformers chooses between the two by the
        length of each call. Tandem caches rotated keys, which cannot be rotated again, so
        `max_model_len` decides for all sequences."""
        layers = tuple(
            replace(layer, rope=layer.rope.for_contexts(max_model_len)) for layer in self.layers
        )
        return replace(self, layers=layers)

    def names_of(self, stored: Iterable[str]) -> dict[str, str]:
        """Maps the name that each tensor of the model has in this package to the name in the
        checkpoint (`names_in_model`)."""
        return names_in_model(
            stored, is_text_part=self.is_text_part, tensor_names=self.tensor_names
        )

    def name_in_files(self, name: str) -> str:
        """Returns the name that a tensor has in checkpoints of the text part alone."""
        # The longest part first, because a shorter one may be a part of it. A number stands for a
        # replaced part until the end, so that no part is replaced twice. The dots around a part
        # belong to its neighbours, too.
        rules = sorted(self.tensor_names.items(), key=lambda rule: -len(rule[1]))
        for index, (_, ours) in enumerate(rules):
            name = name.replace(ours, ours.replace(ours.strip("."), f"<{index}>"))
        for index, (own, _) in enumerate(rules):
            name = name.replace(f"<{index}>", own.strip("^."))
        return name

    def heads_of(self, layer: LayerSpec) -> Heads:
        """Returns the KV heads of a layer."""
        return layer.heads or Heads(self.num_kv_heads, self.head_dim)

    @property
    def is_parallel(self) -> bool:
        """True: the MLP reads the residual stream before the output of attention is added."""
        return self.norms == "parallel"

    @property
    def has_gates(self) -> bool:
        """False: MLPs and experts are down . activation(up)."""
        return self.activation != "relu2"

    @property
    def norms_rotated_heads(self) -> bool:
        """True: q and k are normalized after RoPE."""
        return self.qk_norm in ("rotated", "rotated_plain")

    @property
    def is_fp8(self) -> bool:
        """True if all quantized matrices are stored in fp8."""
        return self.quantization is not None and self.quantization.is_float

    @property
    def is_long(self) -> bool:
        """True if a layer uses longrope's long factors, because contexts may be longer than the
        original context of the model."""
        return any(layer.rope.is_long for layer in self.layers)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Reads the parsed contents of config.json and generation_config.json.

        Raises UnsupportedModel naming the field that is not supported and the values that are.
        """
        eos_token_ids = read_eos_token_ids(config, generation_config)
        config, score_head = classified(config)
        text = text_config(config)
        architecture = _architecture(config) if text is None else _family_of_part(text)
        config = config if text is None else text
        family = FAMILIES[architecture]
        config = _with_defaults(config, family)
        _check_supported(config, family)
        num_heads = size(config, "num_attention_heads")
        hidden_size = size(config, "hidden_size")
        latent = read_latent(config, family)
        num_kv_heads, head_dim = (
            (1, latent.kv_dim) if latent else _kv_heads(config, num_heads, hidden_size)
        )
        if family.has_mimo_layers and size(config, "v_head_dim") > head_dim:
            raise UnsupportedModel(
                f"v_head_dim is {config['v_head_dim']}; it must be at most head_dim, {head_dim}"
            )
        has_bias = family.biases.startswith("config") and flag(config, "attention_bias")
        out_key = "attention_out_bias" if family.biases == "config_apart" else "attention_bias"
        max_model_len = _max_model_len(config, family)
        layers = read_layers(config, family, size(config, "num_hidden_layers"), max_model_len)
        shared_kv = None
        if family.has_deepseek_v4_layers:
            layers = with_deepseek_v4_layers(layers, config)
            shared_kv = read_shared_kv(config, [layer.rope for layer in layers])
            layers = tuple(
                replace(each, rope=replace(each.rope, rotary_share=1.0)) for each in layers
            )
        if latent is not None and family.has_partial_rope:
            layers = tuple(replace(each, rope=latent.whole_rope(each.rope)) for each in layers)
        _check_ropes(layers, family, latent.rope_dim if latent else head_dim)
        if family.has_gemma4_layers:
            layers = with_gemma4_layers(layers, config, Heads(num_kv_heads, head_dim))
        if family.has_alt_up:
            layers = with_gemma3n_layers(layers, config)
            config = {**config, **largest_inner(config)}
        return cls(
            architecture=architecture,
            vocab_size=size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size(config, "intermediate_size"),
            layers=layers,
            num_attention_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            qkv_bias=family.biases == "qkv" or has_bias,
            attention_out_bias=(
                family.biases in ("config", "config_apart") and flag(config, out_key)
            ),
            mlp_bias=flag(config, "mlp_bias"),
            qk_norm=(
                family.qk_norm if flag(config, family.qk_norm_key, not family.qk_norm_key) else ""
            ),
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            torch_dtype=read_dtype(config),
            norms=family.norms,
            norm_offset=family.norm_offset,
            centers_norms=family.centers_norms,
            activation=_activations(family)[config.get(family.activation_key, "silu")],
            multipliers=_multipliers(config, family, hidden_size),
            logit_cap=_cap(config, family, "final_logit_softcapping"),
            attention_cap=_cap(config, family, "attn_logit_softcapping"),
            has_sinks=family.has_sinks,
            gate_clamp=_gate_clamp(config, family),
            layer_factors=(
                read_layer_factors(config) if family.multipliers == "falcon_h1" else None
            ),
            is_mxfp4=_has_own_quantization(config, family),
            expert_form=family.experts,
            quantization=(
                None if _has_own_quantization(config, family) else read_quantization(config)
            ),
            has_kv_scales=has_kv_scales(config),
            has_fused_qkv=family.fused == "all",
            has_fused_mlp=family.fused in ("mlp", "all"),
            may_fuse_mlp=family.fused == "maybe_mlp",
            has_rope_pairs=family.has_rope_pairs,
            tensor_names=_tensor_names(config, family),
            latent=latent,
            shared_kv=shared_kv,
            streams=read_streams(config) if family.has_deepseek_v4_layers else None,
            has_attention_gates=family.has_attention_gates,
            has_head_gates=family.has_head_gates,
            value_dim=size(config, "v_head_dim") if family.has_mimo_layers else None,
            value_scale=(
                optional_number(config, "attention_value_scale", 1.0)
                if family.has_mimo_layers
                else 1.0
            ),
            has_value_norms=family.has_gemma4_layers or family.has_alt_up,
            has_layer_scalars=family.has_gemma4_layers,
            per_layer_inputs=(
                read_per_layer_inputs(config, has_all=not family.has_alt_up)
                if family.has_gemma4_layers or family.has_alt_up
                else None
            ),
            alt_up=read_alt_up(config) if family.has_alt_up else None,
            num_extra_layers=_num_extra_layers(config, family),
            is_text_part=text is not None,
            score_head=score_head,
        )


def read_eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a sequence, from config.json and
    generation_config.json.

    Raises UnsupportedModel if a value is neither a token id nor a list of token ids.
    """
    text_config = config.get("text_config")
    nested = text_config if isinstance(text_config, dict) else {}
    found: list[int] = []
    for source in (generation_config or {}, config, nested):
        eos = source.get("eos_token_id")
        ids = eos if isinstance(eos, list | tuple) else [eos]
        if any(type(token_id) is not int or token_id < 0 for token_id in ids if eos is not None):
            raise UnsupportedModel(
                f"eos_token_id of config.json or generation_config.json is {eos!r:.80}; it "
                "must be a token id or a list of them"
            )
        found += [token_id for token_id in ids if token_id is not None]
    return tuple(dict.fromkeys(found))


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or ["(none named)"]
    first = named[0] if isinstance(named, list) else named
    if not isinstance(named, list) or not isinstance(first, str) or first not in FAMILIES:
        raise UnsupportedModel(
            f"architecture {first!s:.80} is not supported; supported are {', '.join(FAMILIES)}, "
            "and the text parts of multimodal models of these architectures"
        )
    architecture = first
    kind = config.get("model_type")
    if kind is not None and _family_of(kind) not in (None, architecture):
        raise UnsupportedModel(
            f"model_type is {kind!r:.80}, which means {_family_of(kind)}, but architectures has "
            f"{architecture}; both must mean the same architecture"
        )
    return architecture


def _family_of_part(text: Mapping[str, Any]) -> str:
    """Returns the architecture of a multimodal checkpoint's text part. Raises UnsupportedModel."""
    kind = text["model_type"]
    if (family := _family_of(kind)) is None:
        raise UnsupportedModel(
            f"the text part of this multimodal checkpoint is of the family {kind!r:.80} "
            f"(text_config.model_type), which is not supported; supported are {', '.join(FAMILIES)}"
        )
    return family


def _family_of(model_type: object) -> str | None:
    """Returns the supported architecture for a `model_type`; None if there is none."""
    plain = str(model_type).replace("_", "").removesuffix("text")
    name = f"{plain}forcausallm"
    return next((each for each in FAMILIES if each.lower().replace("_", "") == name), None)


def _with_defaults(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the config with transformers' defaults for absent keys."""
    check_kinds(config, family.key_names.get("layer_types", "layer_types"))
    renamed = {ours: config[own] for ours, own in family.key_names.items() if own in config}
    filled = {**family.defaults, **config, **renamed}
    if family.has_rotary_dim and config.get("rotary_dim") is not None:
        share = size(config, "rotary_dim") / size(filled, "head_dim")
        filled.setdefault("partial_rotary_factor", share)
    if family.has_clamped_gates and filled.get("hidden_act") == "swigluoai":
        filled["hidden_act"] = "silu"  # MiniMax M3's name of clamped gates
    if family.has_mimo_layers and config.get("sliding_window_size") is not None:
        filled["sliding_window"] = size(config, "sliding_window_size") + 1
    pattern = config.get("hybrid_override_pattern")
    if family.has_single_parts and filled.get("layer_types") is None and pattern is not None:
        filled["layer_types"] = kinds_of_pattern(pattern)
    if family.has_single_parts and isinstance(filled.get("layer_types"), list):
        filled["num_hidden_layers"] = len(filled["layer_types"])
    if family.linear == "kimi_delta":
        filled = with_kimi_layers(filled)
    if not has_experts(filled, family):
        filled["intermediate_size"] = filled["shared_intermediate_size"]
    if "block_auto_adjust_ff_dim" in family.defaults and flag(filled, "block_auto_adjust_ff_dim"):
        filled["intermediate_size"] = _adjusted(filled)
    if family.has_deepseek_v4_layers:
        return with_plain_keys(filled)
    if config.get("rope_parameters") is None:  # Older files call the field `rope_scaling`.
        scaled = bool(config.get("rope_scaling"))
        filled["rope_parameters"] = None if scaled else family.defaults.get("rope_parameters")
    return filled


def _adjusted(config: Mapping[str, Any]) -> int:
    """Returns the intermediate size of LFM2 for what config.json says: two thirds of it times a
    factor, rounded up to a multiple."""
    inner = int(2 * size(config, "intermediate_size") / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return inner
    inner = int(number(config, "block_ffn_dim_multiplier", 1.0) * inner)
    multiple = size(config, "block_multiple_of")
    return -(-inner // multiple) * multiple


def _tensor_names(config: Mapping[str, Any], family: Family) -> Mapping[str, str]:
    if has_experts(config, family):
        return family.tensor_names
    return {
        own: ours.replace(".mlp.shared_experts.", ".mlp.")
        for own, ours in family.tensor_names.items()
    }


def _has_own_quantization(config: Mapping[str, Any], family: Family) -> bool:
    """Returns whether the checkpoint's `quant_method` is `family.quantization`, which only gpt-oss
    has (mxfp4)."""
    quantization = config.get("quantization_config")
    if not family.quantization or not isinstance(quantization, dict):
        return False
    return quantization.get("quant_method") == family.quantization


def _check_supported(config: Mapping[str, Any], family: Family) -> None:
    activation = config.get(family.activation_key, "silu")
    if not isinstance(activation, str) or activation not in _activations(family):
        raise UnsupportedModel(
            f"{family.activation_key} is {activation!r:.80}, which is not supported; supported are "
            f"{', '.join(_activations(family))}"
        )
    if not flag(config, "is_causal", True):
        raise UnsupportedModel(
            "is_causal is false, which is not supported: a token can only attend to earlier tokens"
        )
    for key in family.refuses:
        if config.get(key):
            raise UnsupportedModel(f"{key} is {config[key]!r:.80}, which is not supported")
    for key, allowed in family.demands.items():
        if config.get(key, allowed[0]) not in allowed:
            raise UnsupportedModel(
                f"{key} is {config[key]!r:.80}, which is not supported; supported are "
                f"{', '.join(map(str, allowed))}"
            )


def _activations(family: Family) -> Mapping[str, Activation]:
    if family.lacks_gates:
        return _UNGATED
    # transformers uses the same activation after convolutions, for which only SiLU is supported.
    return {"silu": "silu", "swish": "silu"} if family.linear else _ACTIVATIONS


def _kv_heads(config: Mapping[str, Any], num_heads: int, hidden_size: int) -> tuple[int, int]:
    """Returns the number of KV heads and the head size."""
    num_kv_heads = optional_size(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"num_key_value_heads is {num_kv_heads}; it must divide num_attention_heads, "
            f"{num_heads}"
        )
    return num_kv_heads, optional_size(config, "head_dim", hidden_size // num_heads)


def _num_extra_layers(config: Mapping[str, Any], family: Family) -> int:
    num = config.get("num_nextn_predict_layers")
    if num and not family.has_extra_layers:
        raise UnsupportedModel(
            f"num_nextn_predict_layers is {num!r:.80}; multi-token prediction (MTP) layers are not "
            "supported for this architecture"
        )
    if num is not None and (type(num) is not int or num < 0):
        raise UnsupportedModel(
            f"num_nextn_predict_layers is {num!r:.80}; it must be an integer of at least 0"
        )
    return num or 0


def _max_model_len(config: Mapping[str, Any], family: Family) -> int:
    stated = size(config, "max_position_embeddings")
    ropes = read_ropes(
        config,
        default_theta=family.rope_theta,
        by_kind=family.has_rope_by_kind,
        local_theta=family.local_rope_theta,
    )
    scaling = ropes["full_attention"].scaling
    if scaling is not None and scaling.kind not in family.scalings:
        raise UnsupportedModel(
            f"rope scaling {scaling.kind!r} is not supported for this architecture; supported is "
            f"{', '.join(family.scalings)}"
        )
    if scaling is None or family.is_length_scaled:
        return stated
    return scaling.max_model_len(stated)


def _check_ropes(layers: Sequence[LayerSpec], family: Family, head_dim: int) -> None:
    for rope in dict.fromkeys(layer.rope for layer in layers):
        rotary_dim = rope.rotary_dim(head_dim)
        if rotary_dim != head_dim and not family.has_partial_rope:
            raise UnsupportedModel(
                f"partial_rotary_factor {rope.rotary_share} is not supported for this "
                "architecture; it must be 1"
            )
        if rotary_dim % 2:
            raise UnsupportedModel(
                f"partial_rotary_factor {rope.rotary_share} rotates {rotary_dim} of the "
                f"{head_dim} dimensions of a head; the number of rotated dimensions must be even"
            )
        scaling = rope.scaling
        for factors in (scaling.short_factors, scaling.long_factors) if scaling else ():
            if scaling and scaling.kind == "longrope" and len(factors) != rotary_dim // 2:
                raise UnsupportedModel(
                    f"rope scaling 'longrope' has a list of {len(factors)} factors; it must have "
                    f"one for each of {rotary_dim // 2} frequencies"
                )


def _multipliers(config: Mapping[str, Any], family: Family, hidden_size: int) -> Multipliers:
    if family.multipliers == "granite":
        return Multipliers(
            embedding=number(config, "embedding_multiplier", 1.0),
            attention=number(config, "attention_multiplier", 1.0),
            residual=number(config, "residual_multiplier", 1.0),
            logits=1.0 / number(config, "logits_scaling", 1.0),
        )
    if family.multipliers == "falcon_h1":
        return Multipliers(
            embedding=number(config, "embedding_multiplier", 1.0),
            logits=number(config, "lm_head_multiplier", 1.0),
        )
    if family.multipliers == "cohere":
        return Multipliers(logits=number(config, "logit_scale", 0.0625))
    if family.multipliers == "gemma3n":
        return Multipliers(embedding=hidden_size**0.5, attention=1.0)
    if family.multipliers == "gemma":
        return Multipliers(
            embedding=hidden_size**0.5,
            attention=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        )
    return Multipliers()


def _gate_clamp(config: Mapping[str, Any], family: Family) -> GateClamp | None:
    if not family.has_clamped_gates:
        return None
    if family.has_deepseek_v4_layers:
        return GateClamp(1.0, number(config, "swiglu_limit", 10.0), offset=0.0)
    return GateClamp(number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0))


def _cap(config: Mapping[str, Any], family: Family, name: str) -> float | None:
    if not family.has_caps or config.get(name) is None:
        return None
    return number(config, name, 0.0)


def read_dtype(config: Mapping[str, Any]) -> str:
    """Returns the dtype of the checkpoint's weights. Raises UnsupportedModel for other dtypes than
    those of `_DTYPES`."""
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModel(
            f"weights of dtype {dtype} are not supported; supported are {', '.join(_DTYPES)}"
        )
    return dtype
