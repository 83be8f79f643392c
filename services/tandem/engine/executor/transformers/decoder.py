"""A decoder of the transformers library that keeps its KV in Tandem's pools.

The model's class computes all layers. Its attention calls `_attend`, which is registered as one of
the library's attention functions: it writes the K and V of the step's tokens to the KV pool, and
computes the attention of each sequence over its blocks. The model sees one row with the tokens of
all sequences, one after the other, and their positions. It makes no mask and no cache of its own.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tandem.engine.cache.layout.kv_groups import LayerPlace, layer_places
from tandem.engine.executor.torch.inputs import StepInputs
from tandem.engine.executor.torch.lora import StepLora
from tandem.errors import UnsupportedModel
from tandem.models.config.from_transformers import CHUNKED, layer_types
from tandem.models.config.model import ModelConfig
from tandem_kernels.attention_groups import QuerySpan
from tandem_kernels.dispatch import Attention, Kernels
from tandem_kernels.kv_cache import KvPool

ATTENTION = "tandem_paged"  # name of the attention function in the library


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How a layer attends to the keys in the pool."""

    place: LayerPlace
    window: int | None
    # Size of a chunk: a token attends to earlier tokens of its own chunk only. None: no chunks.
    chunk: int | None


# Properties of a layer that share a `PagedAttention`: KV group, window, chunk, number of heads,
# scale and cap.
_Kind = tuple[int, int | None, int | None, int, float, float | None]


@dataclass(slots=True)
class _Step:
    """The inputs of a step as `_attend` needs them."""

    layers: Sequence[LayerAttention]
    inputs: StepInputs
    pools: Sequence[KvPool]
    kernels: Kernels
    on_kv_written: Callable[[], object] | None
    attentions: dict[_Kind, Attention] = field(default_factory=dict)

    def attention(
        self, layer: LayerAttention, queries: torch.Tensor, scale: float, cap: float | None
    ) -> Attention:
        """Returns the attention of a layer's kind, made once in a step. `queries` is [T, heads,
        D]."""
        group = layer.place.group
        kind = group, layer.window, layer.chunk, queries.shape[1], scale, cap
        if kind not in self.attentions:
            spans: Sequence[QuerySpan] = self.inputs.spans[group]
            pool = self.pools[group]
            if layer.chunk is not None:
                spans = spans_in_chunks(spans, layer.chunk, pool.block_size)
            self.attentions[kind] = self.kernels.attention(
                spans, pool, queries.shape[1], queries.dtype, layer.window, scale, cap
            )
        return self.attentions[kind]


_step: ContextVar[_Step] = ContextVar("_step")  # the step that the thread computes


class TransformersDecoder:
    """Computes steps with a model of the transformers library."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, kernels: Kernels) -> None:
        self._model = model
        self._config = config
        self._kernels = kernels
        chunks = _chunks(model, config)
        self._layers = [
            LayerAttention(place, None if chunk else layer.window, chunk)
            for place, layer, chunk in zip(layer_places(config), config.layers, chunks, strict=True)
        ]
        # The input of the output matrix for each row of the last step's logits: [rows, hidden].
        self.final_hidden = torch.empty(0, config.hidden_size, dtype=model.dtype)
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        head.register_forward_pre_hook(self._keep_hidden)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
        assert ATTENTION not in ALL_MASK_ATTENTION_FUNCTIONS  # so that models make no masks
        model.set_attn_implementation(ATTENTION)

    @property
    def layers(self) -> Sequence[LayerAttention]:
        return self._layers

    def forward(
        self,
        inputs: StepInputs,
        pools: Sequence[KvPool],
        lora: StepLora,
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Computes a step as `Decoder.forward` does. `lora` must have no adapters."""
        assert not inputs.adapted
        step = _Step(self._layers, inputs, pools, self._kernels, on_kv_written)
        before = _step.set(step)
        try:
            out = self._model(
                input_ids=inputs.token_ids.unsqueeze(0),
                position_ids=inputs.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=inputs.logit_rows,
            )
        finally:
            _step.reset(before)
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def _keep_hidden(self, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.final_hidden = args[0].flatten(0, -2)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Writes K and V to the pool and computes the attention over it. `query` is [1, heads, T, D];
    `key` and `value` are [1, KV heads, T, D]. `s_aux` are the attention sinks. Returns [1, T,
    heads, D]."""
    step = _step.get()
    index = int(module.layer_idx)  # type: ignore[arg-type]
    layer = step.layers[index]
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    group = layer.place.group
    step.pools[group].write(layer.place.number, step.inputs.token_rows[group], keys, values)
    if step.on_kv_written is not None and index + 1 == len(step.layers):
        step.on_kv_written()
    scale = queries.shape[-1] ** -0.5 if scaling is None else scaling
    attend = step.attention(layer, queries, scale, softcap)
    return attend(layer.place.number, queries, s_aux).unsqueeze(0), None


def spans_in_chunks(spans: Sequence[QuerySpan], chunk: int, block_size: int) -> Sequence[QuerySpan]:
    """Divides spans at each multiple of `chunk` tokens. A part of a span has only the blocks of its
    own chunk, so that full attention over them is chunked attention. `chunk` must be a multiple of
    the block size."""
    assert chunk % block_size == 0
    parts = []
    for span in spans:
        first = span.context_len - span.num_queries
        start = first
        while start < span.context_len:
            begin = start // chunk * chunk
            end = min(begin + chunk, span.context_len)
            parts.append(
                QuerySpan(
                    span.first_row + start - first,
                    end - start,
                    end - begin,
                    span.block_table[begin // block_size :],
                )
            )
            start = end
    return parts


def _chunks(model: PreTrainedModel, config: ModelConfig) -> list[int | None]:
    """Returns the size of a chunk for each layer with chunked attention; None for other layers."""
    return [
        layer.window if kind == CHUNKED else None
        for kind, layer in zip(layer_types(model.config), config.layers, strict=True)
    ]


def check_chunks(config: ModelConfig, layers: Sequence[LayerAttention], block_size: int) -> None:
    """Raises UnsupportedModel if the chunks of chunked attention do not begin with a block."""
    for layer in layers:
        if layer.chunk is not None and layer.chunk % block_size:
            raise UnsupportedModel(
                f"{config.architecture} attends in chunks of {layer.chunk} tokens, which must be a "
                f"multiple of block-size, {block_size}"
            )
