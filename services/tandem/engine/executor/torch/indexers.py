"""The indexers of sparse attention (models/config/indexer.py), computed with torch for one step."""

import torch
from torch.nn.functional import layer_norm

from tandem.engine.executor.torch.inputs import StepInputs
from tandem.engine.executor.weights.decoder_weights import INDEX_NORM_EPS, IndexerWeights
from tandem.models.config.indexer import Indexer
from tandem.models.config.model import ModelConfig
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
        config: ModelConfig,
        kernels: Kernels,
        attention: Attention,
        pool: KvPool,
        inputs: StepInputs,
    ) -> None:
        """`attention` is that of the step, and `pool` has the KV of all layers."""
        self._config = config
        self._kernels = kernels
        self._pool = pool
        self._token_rows = inputs.token_rows[0]
        self._chooser = KeyChoice(attention.groups, pool, kernels.scores)
        with_indexers = [i for i, spec in enumerate(config.layers) if spec.indexer is not None]
        # Number of a layer with an indexer -> its index among these layers.
        self._numbers = {layer: number for number, layer in enumerate(with_indexers)}
        self._last: Choice | None = None

    def write_keys(
        self, layer: int, weights: IndexerWeights | None, x: torch.Tensor, angles: Angles
    ) -> None:
        """Writes the indexer's keys of the step's tokens to the pool."""
        indexer = self._config.layers[layer].indexer
        if indexer is None or weights is None:
            return
        keys = self._kernels.linear(x, weights.keys, None)
        norm, bias = weights.key_norm, weights.key_norm_bias
        if bias is None:
            keys = self._kernels.rms_norm(keys, norm, self._config.rms_norm_eps)
        else:
            keys = layer_norm(keys, (indexer.dim,), norm, bias, INDEX_NORM_EPS)
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
        spec = self._config.layers[layer]
        if spec.shares_choice:
            return self._last
        if (indexer := spec.indexer) is None or weights is None:
            return None
        inputs = x if query_latents is None else query_latents
        queries = self._kernels.linear(inputs, weights.queries, None)
        queries = queries.view(len(x), -1, indexer.dim)
        if weights.query_norm is not None:
            eps = self._config.rms_norm_eps
            queries = self._kernels.rms_norm(queries, weights.query_norm, eps)
        queries = self._rotated(queries, indexer, angles)
        number = self._numbers[layer]
        if indexer.block_size is not None:
            self._last = self._chooser.choose_blocks(
                number,
                queries,
                indexer.top_k,
                block_size=indexer.block_size,
                num_local=indexer.num_local,
            )
        else:
            assert weights.head_weights is not None
            shares = self._kernels.linear(x.float(), weights.head_weights, None)
            self._last = self._chooser.choose_tokens(number, queries, shares, indexer.top_k)
        return self._last

    def _rotated(self, heads: torch.Tensor, indexer: Indexer, angles: Angles) -> torch.Tensor:
        """Returns an indexer's heads [rows, heads, dim] with their first elements rotated. `angles`
        are those of attention's heads, of which the first are rotated."""
        first, others = heads[..., : indexer.rope_dim], heads[..., indexer.rope_dim :]
        cos, sin = (each[..., : indexer.rope_dim // 2] for each in angles)
        return torch.cat((self._kernels.rotate(first, (cos, sin)), others), -1)
