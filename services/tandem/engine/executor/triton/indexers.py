"""The indexers of sparse attention (models/config/indexer.py), computed with the Triton kernels for
one step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.engine.executor.triton.inputs import StepViews
from tandem.engine.executor.weights.decoder_weights import INDEX_NORM_EPS, IndexerWeights
from tandem.models.config.model import ModelConfig
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.linear import linear
from tandem_kernels.triton.key_choice import ChosenKeys, QueryPlaces, choose_keys, index_heads
from tandem_kernels.triton.rope_cache import Angles

# Stores the keys of a layer's indexer, and chooses the keys of attention. The argument has the
# latents of the step's queries, [T, q rank]; None: queries have no latents.
Choose = Callable[[torch.Tensor | None], ChosenKeys]


class StepIndexers:
    """Chooses the tokens to which the queries of each layer attend. Layers must be computed in
    their order, because some use the choice of an earlier one."""

    def __init__(
        self, config: ModelConfig, pool: KvPool, step: StepViews, max_model_len: int
    ) -> None:
        """`pool` has the KV of all layers."""
        self._config = config
        self._pool = pool
        self._step = step
        self._places = places_of(step)
        # A step that replays a CUDA graph has tables for the longest context.
        table_tokens = step.block_tables.shape[2] * pool.block_size
        self._context_len_max = min(max_model_len, table_tokens)
        with_indexers = [i for i, spec in enumerate(config.layers) if spec.indexer is not None]
        # Number of a layer with an indexer -> its index among these layers.
        self._numbers = {layer: number for number, layer in enumerate(with_indexers)}
        self._last: ChosenKeys | None = None

    def of_layer(
        self, layer: int, weights: IndexerWeights | None, x: torch.Tensor, angles: Angles
    ) -> Choose | None:
        """Returns a function that chooses the keys of a layer; None: queries attend to all earlier
        tokens. `x` has the normalized hidden states, [T, hidden]. `angles` are those of attention's
        heads, of which the first are rotated."""
        spec = self._config.layers[layer]
        if spec.shares_choice:
            return self._shared
        if weights is None:
            return None
        return lambda query_latents: self._choose(layer, weights, x, query_latents, angles)

    def _shared(self, query_latents: torch.Tensor | None) -> ChosenKeys:
        assert self._last is not None
        return self._last

    def _choose(
        self,
        layer: int,
        weights: IndexerWeights,
        x: torch.Tensor,
        query_latents: torch.Tensor | None,
        angles: Angles,
    ) -> ChosenKeys:
        indexer = self._config.layers[layer].indexer
        assert indexer is not None
        keys = self._pool.index_keys(self._numbers[layer])
        has_bias = weights.key_norm_bias is not None
        queries = index_heads(
            linear(x if query_latents is None else query_latents, weights.queries, None),
            linear(x, weights.keys, None),
            angles,
            self._step.slots[0],
            keys,
            rope_dim=indexer.rope_dim,
            key_norm=weights.key_norm,
            key_bias=weights.key_norm_bias,
            key_eps=INDEX_NORM_EPS if has_bias else self._config.rms_norm_eps,
            query_norm=weights.query_norm,
            query_eps=self._config.rms_norm_eps,
        )
        shares = None
        if weights.head_weights is not None:
            shares = linear(x.float(), weights.head_weights, None)
        self._last = choose_keys(
            queries,
            shares,
            keys,
            self._places,
            indexer.top_k,
            block_size=indexer.block_size,
            num_local=indexer.num_local,
            context_len_max=self._context_len_max,
        )
        return self._last


def places_of(step: StepViews) -> QueryPlaces:
    """Returns where the context of each row of a step is, in the only KV group."""
    num_single = step.shape.num_single
    lens = step.context_lens
    device = lens.device
    seqs = torch.arange(num_single, dtype=torch.int32, device=device)
    if not step.shape.num_chunks:
        return QueryPlaces(step.block_tables[0], seqs, lens)
    ends = step.query_starts[1:]
    num_rows = step.shape.num_tokens - num_single
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    chunks = torch.searchsorted(ends, rows, right=True)
    rows_left = ends[chunks] - rows - 1  # in the chunk, after each row
    return QueryPlaces(
        step.block_tables[0],
        torch.cat((seqs, chunks.int() + num_single)),
        torch.cat((lens[:num_single], lens[num_single:][chunks] - rows_left)),
    )
