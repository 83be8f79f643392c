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
from tandem.models.config.layers import LayerSpec
from tandem.models.config.model import ModelConfig
from tandem_kernels.dispatch import Attention, Kernels
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.state_pool import Pool, without_states

ATTENTION = "tandem_paged"  # name of the attention function in the library


# The properties by which attention differs: KV group (which has the window), whether the window is
# a chunk, number of heads, scale and cap.
_Kind = tuple[int, bool, int, float, float | None]


@dataclass(slots=True)
class _Step:
    """The inputs of a step as `_attend` needs them."""

    layers: Sequence[tuple[LayerSpec, LayerPlace | None]]
    inputs: StepInputs
    pools: Sequence[KvPool]
    kernels: Kernels
    on_kv_written: Callable[[], object] | None
    attentions: dict[_Kind, Attention] = field(default_factory=dict)

    def attention(
        self, layer: LayerSpec, group: int, queries: torch.Tensor, scale: float, cap: float | None
    ) -> Attention:
        """Returns the attention of a layer's kind, made once in a step. `queries` is [T, heads,
        D]."""
        kind = group, layer.is_chunked, queries.shape[1], scale, cap
        if kind not in self.attentions:
            self.attentions[kind] = self.kernels.attention(
                self.inputs.spans[group],
                self.pools[group],
                queries.shape[1],
                queries.dtype,
                None if layer.is_chunked else layer.window,
                scale,
                cap,
                layer.window if layer.is_chunked else None,
            )
        return self.attentions[kind]


_step: ContextVar[_Step] = ContextVar("_step")  # the step that the thread computes


class TransformersDecoder:
    """Computes steps with a model of the transformers library."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, kernels: Kernels) -> None:
        self._model = model
        self._config = config
        self._kernels = kernels
        self._layers = list(zip(config.layers, layer_places(config), strict=True))
        # The input of the output matrix for each row of the last step's logits: [rows, hidden].
        self.final_hidden = torch.empty(0, config.hidden_size, dtype=model.dtype)
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        head.register_forward_pre_hook(self._keep_hidden)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
        assert ATTENTION not in ALL_MASK_ATTENTION_FUNCTIONS  # so that models make no masks
        model.set_attn_implementation(ATTENTION)

    def forward(
        self,
        inputs: StepInputs,
        pools: Sequence[Pool],
        lora: StepLora,
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Computes a step as `Decoder.forward` does. `lora` must have no adapters."""
        assert not inputs.adapted
        step = _Step(self._layers, inputs, without_states(pools), self._kernels, on_kv_written)
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
    layer, place = step.layers[index]
    assert place is not None
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    pool = step.pools[place.group]
    pool.write(place.number, step.inputs.token_rows[place.group], keys, values)
    if step.on_kv_written is not None and index + 1 == len(step.layers):
        step.on_kv_written()
    scale = queries.shape[-1] ** -0.5 if scaling is None else scaling
    attend = step.attention(layer, place.group, queries, scale, softcap)
    return attend(place.number, queries, s_aux).unsqueeze(0), None
