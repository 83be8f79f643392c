"""A decoder's weights, from the safetensors of a Hugging Face folder.

Files are mapped: a tensor that is stored in the compute dtype is never copied, and all processes
that map it share its memory. The config names and shapes every tensor; a missing, surplus or
wrongly shaped one is an error before anything is read.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tandem.errors import UnsupportedModel
from tandem.models.broken_files import naming
from tandem.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]

# Tables that old checkpoints carry along; they follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_EMBEDDING = "model.embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_FINAL_NORM = "model.norm.weight"
_NAMES_SHOWN_MAX = 3
# A layer's norms by where they stand, as LayerWeights and as checkpoints name them.
_NORMS = {
    "before": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "after": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "around": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's weights; norms that a family adds an offset to have it, and are float32."""

    qkv: tuple[Linear, ...]  # q, k and v, or one with the rows of all three
    attention_out: Linear
    gate_up: tuple[Linear, ...]  # gate and up, or one with the rows of both
    down: Linear
    attention_norm: torch.Tensor | None = None  # before attention
    attention_post_norm: torch.Tensor | None = None  # of what it adds
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim], or [all heads * head_dim]
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    output: torch.Tensor  # [vocab, hidden]; the embedding itself when they are tied


def load_weights(
    files: Sequence[Path], config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Raises UnsupportedModel naming the tensors that are missing, surplus or wrongly shaped, and
    ConfigError naming a file that cannot be read."""
    stored = _map_files(files)
    with naming(files[0].parent):
        if config.num_layers > len(stored):
            raise UnsupportedModel(
                f"{config.num_layers} layers are more than the checkpoint has tensors"
            )
        _check(stored, expected_shapes(config), tied=config.tie_word_embeddings)
    builder = _Builder(stored, config, dtype, device)
    embedding = builder.tensor(_EMBEDDING)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(builder.layer(f"model.layers.{i}") for i in range(config.num_layers)),
        final_norm=builder.norm(_FINAL_NORM),
        output=embedding if config.tie_word_embeddings else builder.tensor(_OUTPUT),
    )


def expected_shapes(config: ModelConfig) -> Shapes:
    """Every tensor that a checkpoint of this model must have."""
    hidden = config.hidden_size
    shapes: Shapes = {_EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_OUTPUT] = (config.vocab_size, hidden)
    layer = _layer_shapes(config)
    for i in range(config.num_layers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(config: ModelConfig) -> Shapes:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * head_dim, config.num_kv_heads * head_dim
    linears = {
        "self_attn.o_proj": (hidden, q_size, config.attention_out_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    if config.is_fused:
        linears["self_attn.qkv_proj"] = (q_size + 2 * kv_size, hidden, config.qkv_bias)
        linears["mlp.gate_up_proj"] = (2 * inner, hidden, config.mlp_bias)
    else:
        linears["self_attn.q_proj"] = (q_size, hidden, config.qkv_bias)
        linears["self_attn.k_proj"] = (kv_size, hidden, config.qkv_bias)
        linears["self_attn.v_proj"] = (kv_size, hidden, config.qkv_bias)
        linears["mlp.gate_proj"] = (inner, hidden, config.mlp_bias)
        linears["mlp.up_proj"] = (inner, hidden, config.mlp_bias)
    shapes: Shapes = {f"{name}.weight": (hidden,) for name in _NORMS[config.norms].values()}
    if config.qk_norm:
        has_all = config.qk_norm == "all"
        shapes["self_attn.q_norm.weight"] = (q_size if has_all else head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv_size if has_all else head_dim,)
    for name, (num_out, num_in, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    return shapes


def _map_files(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with naming(file):
            tensors |= load_file(file)
    return tensors


def _check(stored: dict[str, torch.Tensor], expected: Shapes, *, tied: bool) -> None:
    missing = expected.keys() - stored.keys()
    if missing:
        raise UnsupportedModel(f"the checkpoint lacks {_named(missing)}, which its config implies")
    surplus = {name for name in stored.keys() - expected.keys() if not _DERIVED.fullmatch(name)}
    if tied:
        surplus.discard(_OUTPUT)  # some checkpoints store the tied matrix twice
    if surplus:
        raise UnsupportedModel(f"the checkpoint has {_named(surplus)}, which its config denies")
    for name, shape in expected.items():
        tensor = stored[name]
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                f"{name} has shape {list(tensor.shape)}; the config implies {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"{name} holds {tensor.dtype}, not floating-point numbers")


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN_MAX
    shown = ", ".join(ordered[:_NAMES_SHOWN_MAX])
    return f"{shown} and {more} more tensors" if more > 0 else shown


class _Builder:
    """Brings tensors, by name, into the compute dtype and onto the device."""

    def __init__(
        self,
        stored: dict[str, torch.Tensor],
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stored = stored
        self._config = config
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str) -> torch.Tensor:
        return self._stored[name].to(device=self._device, dtype=self._dtype)

    def layer(self, name: str) -> LayerWeights:
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        norms = {
            field: self.norm(f"{name}.{stored}.weight")
            for field, stored in _NORMS[self._config.norms].items()
        }
        if self._config.qk_norm:
            norms["q_norm"] = self.norm(f"{attention}.q_norm.weight")
            norms["k_norm"] = self.norm(f"{attention}.k_norm.weight")
        if self._config.is_fused:
            qkv: tuple[Linear, ...] = (self._linear(f"{attention}.qkv_proj"),)
            gate_up: tuple[Linear, ...] = (self._linear(f"{mlp}.gate_up_proj"),)
        else:
            qkv = self._joined(*(f"{attention}.{part}_proj" for part in "qkv"))
            gate_up = self._joined(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        return LayerWeights(
            qkv=qkv,
            attention_out=self._linear(f"{attention}.o_proj"),
            gate_up=gate_up,
            down=self._linear(f"{mlp}.down_proj"),
            **norms,
        )

    def norm(self, name: str) -> torch.Tensor:
        """Returns the weights of a norm. With an offset they are float32: in bfloat16 the sum
        would lose most of its digits."""
        if not self._config.norm_offset:
            return self.tensor(name)
        stored = self._stored[name].to(device=self._device, dtype=torch.float32)
        return stored + self._config.norm_offset

    def _optional(self, name: str) -> torch.Tensor | None:
        return self.tensor(name) if name in self._stored else None

    def _linear(self, name: str) -> Linear:
        return Linear(self.tensor(f"{name}.weight"), self._optional(f"{name}.bias"))

    def _joined(self, *names: str) -> tuple[Linear, ...]:
        """One matrix for products of the same input, where it costs no copy that is not made
        anyway: mapped tensors stay apart."""
        first = self._stored[f"{names[0]}.weight"]
        if first.dtype == self._dtype and first.device == self._device:
            return tuple(self._linear(name) for name in names)
        has_bias = f"{names[0]}.bias" in self._stored
        return (
            Linear(
                self._stacked([f"{name}.weight" for name in names]),
                self._stacked([f"{name}.bias" for name in names]) if has_bias else None,
            ),
        )

    def _stacked(self, names: list[str]) -> torch.Tensor:
        parts = [self._stored[name] for name in names]
        sizes = [len(part) for part in parts]
        shape = (sum(sizes), *parts[0].shape[1:])
        stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        for rows, part in zip(torch.split(stacked, sizes), parts, strict=True):
            rows.copy_(part)
        return stacked
