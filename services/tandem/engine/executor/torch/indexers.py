"""The indexers of sparse attention (models/config/indexer.py), computed with torch for one step."""

from collections.abc import Sequence

import torch
from torch.nn.functional import layer_norm

from tandem.engine.executor.torch.inputs import StepInputs
from tandem.engine.executor.weights.decoder_weights import INDEX_NORM_EPS, IndexerWeights
from tandem.models.config.indexer import Indexer
from tandem.models.config.layers import LayerSpec
from tandem_kernels.dispatch import Angles, Attention, Kernels
from tandem_kernels.key_choice import Choice, KeyChoice
from tandem_kernels.kv_cache import KvPool


class StepIndexers:
    """Writes the keys of the indexers, and chooses the tokens to which the queries of each layer
    attend. Layers must be computed in their order, because some use the choice of an earlier one.

    In each method, `layer` is the number of a layer and `weights` are those of its indexer, if it
    has one. `x` has the normalized hidden states, [rows, hidden].
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        kernels: Kernels,
        attention: Attention,
        pool: KvPool,
        inputs: StepInputs,
    ) -> None:
        """`attention` is that of the step, and `pool` has the KV of all layers."""
        self._specs = specs
        self._kernels = kernels
        self._pool = pool
        self._token_rows = inputs.token_rows[0]
        self._chooser = KeyChoice(attention.groups, pool, kernels.scores)
        with_indexers = [i for i, spec in enumerate(specs) if spec.indexer is not None]
        # Number of a layer with an indexer -> its index among these layers.
        self._numbers = {layer: number for number, layer in enumerate(with_indexers)}
        self._last: Choice | None = None

    def write_keys(
        self, layer: int, weights: IndexerWeights | None, x: torch.Tensor, angles: Angles
    ) -> None:
        """Writes the indexer's keys of the step's tokens to the pool."""
        indexer = self._specs[layer].indexer
        if indexer is None or weights is None:
            return
        keys = layer_norm(
            self._kernels.linear(x, weights.keys, None),
            (indexer.dim,),
            weights.key_norm,
            weights.key_norm_bias,
            INDEX_NORM_EPS,
        )
        rotated = self._rotated(keys.unsqueeze(1), indexer, angles).squeeze(1)
        num_tokens = len(self._token_rows)
        self._pool.write_index(self._numbers[layer], self._token_rows, rotated[:num_tokens])

    def choice(
        self,
        layer: int,
        weights: IndexerWeights | None,
        x: torch.Tensor,
        query_latents: torch.Tensor | None,
        angles: Angles,
    ) -> Choice | None:
        """Returns the tokens to which the layer's queries attend; None: all earlier tokens. The
        indexer's keys of the step's tokens must be in the pool. `query_latents` is
        [rows, q rank]."""
        spec = self._specs[layer]
        if spec.shares_choice:
            return self._last
        if (indexer := spec.indexer) is None or weights is None:
            return None
        assert query_latents is not None
        queries = self._kernels.linear(query_latents, weights.queries, None)
        queries = self._rotated(queries.view(len(x), -1, indexer.dim), indexer, angles)
        shares = self._kernels.linear(x.float(), weights.head_weights, None)
        self._last = self._chooser.choose(self._numbers[layer], queries, shares, indexer.top_k)
        return self._last

    def _rotated(self, heads: torch.Tensor, indexer: Indexer, angles: Angles) -> torch.Tensor:
        """Returns an indexer's heads [rows, heads, dim] with their first elements rotated."""
        first, others = heads[..., : indexer.rope_dim], heads[..., indexer.rope_dim :]
        return torch.cat((self._kernels.rotate(first, angles), others), -1)
