"""A decoder's weights, from the safetensors of a Hugging Face folder.

Files are mapped: a tensor that is stored in the compute dtype is never copied, and all processes
that map it share its memory. The config names and shapes every tensor; a missing, surplus or
wrongly shaped one is an error before anything is read.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tandem.engine.executor.expert_weights import ExpertNames, Shapes
from tandem.engine.executor.mxfp4 import dequantize
from tandem.errors import UnsupportedModel
from tandem.models.broken_files import naming
from tandem.models.config import ModelConfig
from tandem.models.layers import LayerSpec

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
class Mlp:
    gate_up: tuple[Linear, ...]  # gate and up, or one with the rows of both
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    router: Linear  # [experts, hidden]
    mlps: tuple[Mlp, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's weights; norms that a family adds an offset to have it, and are float32."""

    qkv: tuple[Linear, ...]  # q, k and v, or one with the rows of all three
    attention_out: Linear
    mlp: Mlp | ExpertWeights
    attention_norm: torch.Tensor | None = None  # before attention
    attention_post_norm: torch.Tensor | None = None  # of what it adds
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim], or [all heads * head_dim]
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [heads]: scores without keys


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
        _check(stored, expected_shapes(config, stored), tied=config.tie_word_embeddings)
    builder = _Builder(stored, config, dtype, device)
    embedding = builder.tensor(_EMBEDDING)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(
            builder.layer(f"model.layers.{i}", spec) for i, spec in enumerate(config.layers)
        ),
        final_norm=builder.norm(_FINAL_NORM),
        output=embedding if config.tie_word_embeddings else builder.tensor(_OUTPUT),
    )


def expected_shapes(config: ModelConfig, stored: Collection[str]) -> Shapes:
    """Every tensor that a checkpoint of this model must have, in the form of those it has."""
    hidden = config.hidden_size
    shapes: Shapes = {_EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_OUTPUT] = (config.vocab_size, hidden)
    names = ExpertNames.of(config, stored)
    if not names.is_stacked and _num_experts(config) > len(stored):
        raise UnsupportedModel(
            f"{_num_experts(config)} experts are more than the checkpoint has tensors"
        )
    for i, spec in enumerate(config.layers):
        layer = _attention_shapes(config) | (
            names.shapes(spec.experts, hidden) if spec.experts else _mlp_shapes(config)
        )
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _num_experts(config: ModelConfig) -> int:
    return sum(spec.experts.num for spec in config.layers if spec.experts)


def _attention_shapes(config: ModelConfig) -> Shapes:
    """Returns the shapes of a layer's attention and norms."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * head_dim, config.num_kv_heads * head_dim
    linears = {"self_attn.o_proj": (hidden, q_size, config.attention_out_bias)}
    if config.is_fused:
        linears["self_attn.qkv_proj"] = (q_size + 2 * kv_size, hidden, config.qkv_bias)
    else:
        linears["self_attn.q_proj"] = (q_size, hidden, config.qkv_bias)
        linears["self_attn.k_proj"] = (kv_size, hidden, config.qkv_bias)
        linears["self_attn.v_proj"] = (kv_size, hidden, config.qkv_bias)
    shapes: Shapes = {f"{name}.weight": (hidden,) for name in _NORMS[config.norms].values()}
    if config.has_sinks:
        shapes["self_attn.sinks"] = (config.num_attention_heads,)
    if config.qk_norm:
        has_all = config.qk_norm == "all"
        shapes["self_attn.q_norm.weight"] = (q_size if has_all else head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv_size if has_all else head_dim,)
    return shapes | _linear_shapes(linears)


def _mlp_shapes(config: ModelConfig) -> Shapes:
    hidden, inner, has_bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    linears = {"mlp.down_proj": (hidden, inner, has_bias)}
    if config.is_fused:
        linears["mlp.gate_up_proj"] = (2 * inner, hidden, has_bias)
    else:
        linears["mlp.gate_proj"] = linears["mlp.up_proj"] = (inner, hidden, has_bias)
    return _linear_shapes(linears)


def _linear_shapes(linears: dict[str, tuple[int, int, bool]]) -> Shapes:
    """Returns the shapes of matrices (outputs, inputs) and of the biases that some of them have."""
    shapes: Shapes = {}
    for name, (num_out, num_in, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    return shapes


def rotary_rows(config: ModelConfig) -> torch.Tensor | None:
    """Returns the order of the rows of q, k and v as decoders read them; None: as they are stored.

    Kernels rotate number i of a head with number i + half of it. Where a part of each head is
    rotated, that part's pairs come first in both halves."""
    head_dim = config.head_dim
    rotary_dim = config.layers[0].rope.rotary_dim(head_dim)
    if rotary_dim == head_dim:
        return None
    turned, still = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    halves = zip(turned.chunk(2), still.chunk(2), strict=True)
    of_head = torch.cat([torch.cat(parts) for parts in halves])
    num_heads = config.num_attention_heads + config.num_kv_heads
    turned_rows = (torch.arange(num_heads).unsqueeze(1) * head_dim + of_head).flatten()
    num_values = config.num_kv_heads * head_dim
    return torch.cat((turned_rows, len(turned_rows) + torch.arange(num_values)))


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
        if not tensor.is_floating_point() and not (
            name.endswith(("_blocks", "_scales")) and tensor.dtype == torch.uint8
        ):
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
        self._names = ExpertNames.of(config, stored)

    def tensor(self, name: str) -> torch.Tensor:
        return self._stored[name].to(device=self._device, dtype=self._dtype)

    def layer(self, name: str, spec: LayerSpec) -> LayerWeights:
        attention = f"{name}.self_attn"
        norms = {
            field: self.norm(f"{name}.{stored}.weight")
            for field, stored in _NORMS[self._config.norms].items()
        }
        if self._config.qk_norm:
            norms["q_norm"] = self.norm(f"{attention}.q_norm.weight")
            norms["k_norm"] = self.norm(f"{attention}.k_norm.weight")
        if self._config.is_fused:
            qkv: tuple[Linear, ...] = (self._rotary_first(self._linear(f"{attention}.qkv_proj")),)
        else:
            qkv = self._joined(*(f"{attention}.{part}_proj" for part in "qkv"))
        return LayerWeights(
            qkv=qkv,
            attention_out=self._linear(f"{attention}.o_proj"),
            sinks=self.tensor(f"{attention}.sinks") if self._config.has_sinks else None,
            mlp=self._experts(name, spec.experts.num) if spec.experts else self._mlp(f"{name}.mlp"),
            **norms,
        )

    def _mlp(self, name: str) -> Mlp:
        if self._config.is_fused:
            gate_up: tuple[Linear, ...] = (self._linear(f"{name}.gate_up_proj"),)
        else:
            gate_up = self._joined(f"{name}.gate_proj", f"{name}.up_proj")
        return Mlp(gate_up, self._linear(f"{name}.down_proj"))

    def _experts(self, layer: str, num: int) -> ExpertWeights:
        names = self._names
        gate_ups: list[tuple[Linear, ...]]
        downs: list[tuple[Linear, ...]]
        if names.form == "gpt_oss":
            gate_up, down = (self._of_gpt_oss(f"{layer}.{name}") for name in names.stacked)
            # Gates and ups take turns.
            weight, bias = (torch.cat([each[:, ::2], each[:, 1::2]], 1) for each in gate_up)
            gate_ups = [(Linear(*each),) for each in zip(weight, bias, strict=True)]
            downs = [(Linear(*each),) for each in zip(*down, strict=True)]
        elif names.is_stacked:
            *gates, downs = (self._of_stack(f"{layer}.{name}") for name in names.stacked)
            gate_ups = [tuple(part for (part,) in parts) for parts in zip(*gates, strict=True)]
        else:
            parts = [[f"{layer}.{part}" for part in names.parts(i)] for i in range(num)]
            gate_ups = self._of_experts([(gate, up) for gate, up, _ in parts])
            downs = self._of_experts([(down,) for _, _, down in parts])
        return ExpertWeights(
            router=self._linear(f"{layer}.{names.router}"),
            mlps=tuple(
                Mlp(gate_up, down[0]) for gate_up, down in zip(gate_ups, downs, strict=True)
            ),
        )

    def _of_gpt_oss(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights [experts, out, in] and biases [experts, out]."""
        bias = self.tensor(f"{name}_bias")
        if not self._names.is_mxfp4:
            return self.tensor(name).transpose(1, 2).contiguous(), bias
        blocks, scales = self._stored[f"{name}_blocks"], self._stored[f"{name}_scales"]
        return dequantize(blocks, scales, self._dtype).to(self._device), bias

    def _of_stack(self, name: str) -> list[tuple[Linear, ...]]:
        return [(Linear(each, None),) for each in self.tensor(name)]

    def _of_experts(self, names: Sequence[Sequence[str]]) -> list[tuple[Linear, ...]]:
        """Returns the matrix of each expert, or its parts: views of one tensor of all experts where
        that costs no copy that is not made anyway."""
        if self._is_mapped(names[0][0]):
            return [tuple(Linear(self.tensor(part), None) for part in parts) for parts in names]
        stacked = self._stacked([part for parts in names for part in parts])
        return [(Linear(each, None),) for each in stacked.chunk(len(names))]

    def _rotary_first(self, qkv: Linear) -> Linear:
        rows = rotary_rows(self._config)
        if rows is None:
            return qkv
        rows = rows.to(self._device)
        return Linear(qkv.weight[rows], None if qkv.bias is None else qkv.bias[rows])

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
        if self._is_mapped(f"{names[0]}.weight"):
            return tuple(self._linear(name) for name in names)
        has_bias = f"{names[0]}.bias" in self._stored
        return (
            Linear(
                self._stacked([f"{name}.weight" for name in names]),
                self._stacked([f"{name}.bias" for name in names]) if has_bias else None,
            ),
        )

    def _is_mapped(self, name: str) -> bool:
        """Returns whether a tensor is used as it lies in its file."""
        stored = self._stored[name]
        return stored.dtype == self._dtype and stored.device == self._device

    def _stacked(self, names: list[str]) -> torch.Tensor:
        parts = [self._stored[name] for name in names]
        sizes = [len(part) for part in parts]
        shape = (sum(sizes), *parts[0].shape[1:])
        stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        for rows, part in zip(torch.split(stacked, sizes), parts, strict=True):
            rows.copy_(part)
        return stacked
