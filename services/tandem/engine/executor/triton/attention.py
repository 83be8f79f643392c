"""Computes the attention of a layer with the Triton kernels, in three launches:

1. Normalize and rotate the queries and keys, and store the keys and values in the pool.
2. Attention for the sequences with one token in the step.
3. Attention for the sequences with a chunk of several tokens.

If an indexer chooses the keys (indexers.py), the attention of all rows is one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.engine.executor.torch.lora import AddsLora
from tandem.engine.executor.triton.indexers import Choose
from tandem.engine.executor.triton.inputs import StepViews
from tandem.engine.executor.weights.decoder_weights import LayerWeights
from tandem.models.config.model import ModelConfig
from tandem_kernels.kv_cache import LayerKv
from tandem_kernels.triton.decode_attention import choose_splits, decode_attention
from tandem_kernels.triton.key_choice import ChosenKeys
from tandem_kernels.triton.prefill_attention import prefill_attention
from tandem_kernels.triton.rope_cache import Angles, rotate_and_store
from tandem_kernels.triton.tuning import num_multiprocessors


@dataclass(frozen=True, slots=True)
class LayerStep:
    """The inputs of one layer in one step."""

    step: StepViews
    weights: LayerWeights
    window: int | None
    group: int  # index of the layer's KV group
    kv: LayerKv
    angles: Angles
    # Factors on the queries, fp32 [T]; None: queries are not scaled by position.
    query_factors: torch.Tensor | None
    index: int  # index of the layer in the model
    lora: AddsLora  # adds the LoRA deltas of the step's adapters
    choose: Choose | None  # None: queries attend to all keys of the window

    def scaled(self, queries: torch.Tensor) -> torch.Tensor:
        """Returns queries [T, heads, D], scaled by their positions if the layer does so."""
        if self.query_factors is None:
            return queries
        return queries * self.query_factors.to(queries.dtype).view(-1, 1, 1)


class HeadAttention:
    """Attention that reads separate keys and values for each KV head."""

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self._config = config
        self._max_model_len = max_model_len

    def attend(
        self, qkv: torch.Tensor, at: LayerStep, on_kv_launched: Callable[[], object]
    ) -> torch.Tensor:
        """Returns the attention output [T, heads * D]. `qkv` has q, k and v side by side.

        `on_kv_launched` is called when the kernel that writes the KV is launched.
        """
        has_norms = self._config.qk_norm == "head"
        queries = rotate_and_store(
            qkv,
            at.angles,
            at.step.slots[at.group],
            at.kv.numbers,
            num_heads=self._config.num_attention_heads,
            q_norm=at.weights.q_norm if has_norms else None,
            k_norm=at.weights.k_norm if has_norms else None,
            eps=self._config.rms_norm_eps,
            scales=at.kv.scales,
            fixed_scales=at.kv.fixed_scales,
        )
        chosen = None if at.choose is None else at.choose(None)
        on_kv_launched()
        queries = at.scaled(queries)
        if chosen is not None:
            return self._attend_chosen(queries, at, chosen).flatten(1)
        num_single = at.step.shape.num_single
        parts = []
        if num_single:
            parts.append(self._attend_single(queries[:num_single], at))
        if at.step.shape.num_chunks:
            parts.append(
                prefill_attention(
                    queries[num_single:],
                    at.kv.numbers,
                    at.step.block_tables[at.group, num_single:],
                    at.step.context_lens[num_single:],
                    at.step.query_starts,
                    at.window,
                    self._config.attention_scale,
                    self._config.attention_cap,
                    at.weights.sinks,
                    at.kv.scales,
                )
            )
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _attend_single(self, queries: torch.Tensor, at: LayerStep) -> torch.Tensor:
        block_tables = at.step.block_tables[at.group, : len(queries)]
        context_lens = at.step.context_lens[: len(queries)]
        num_keys_max = min(self._max_model_len, at.window or self._max_model_len)
        return self._decode(queries, at, block_tables, context_lens, num_keys_max)

    def _attend_chosen(
        self, queries: torch.Tensor, at: LayerStep, chosen: ChosenKeys
    ) -> torch.Tensor:
        tables, _, lens = chosen.places
        return self._decode(queries, at, tables, lens, chosen.num_keys_max, chosen)

    def _decode(
        self,
        queries: torch.Tensor,
        at: LayerStep,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        num_keys_max: int,
        chosen: ChosenKeys | None = None,
    ) -> torch.Tensor:
        return decode_attention(
            queries,
            at.kv.numbers,
            block_tables,
            context_lens,
            splits=choose_splits(
                len(queries),
                at.kv.numbers.shape[1],
                num_keys_max,
                num_multiprocessors(queries.device),
            ),
            window=at.window,
            scale=self._config.attention_scale,
            cap=self._config.attention_cap,
            sinks=at.weights.sinks,
            scales=at.kv.scales,
            chosen=chosen,
        )
