"""Computes the latent attention of a layer (tandem/models/config/latent.py) with the Triton
kernels, in five operations:

1. Compute the queries. In models in which queries have a latent too, the latent is normalized and
   multiplied by W_q. In other models, the input already has the queries.
2. Normalize the KV latents, rotate keys and queries, and store the KV, in one kernel.
3. Multiply the unrotated elements of the queries by W_k^T, all heads in one product. The results
   are called absorbed queries.
4. Compute the attention: one launch for sequences with one token, and one launch for chunks.
5. Multiply the attention output by W_v, all heads in one product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from tandem.engine.executor.triton.attention import LayerStep
from tandem.engine.executor.weights.decoder_weights import LATENT_NORM_EPS, LatentWeights
from tandem.models.config.latent import Latent
from tandem_kernels.linear import linear_of_heads
from tandem_kernels.triton.latent_cache import rotate_and_store_latents
from tandem_kernels.triton.latent_decode import choose_latent_splits, latent_decode_attention
from tandem_kernels.triton.latent_loop import LatentQueries
from tandem_kernels.triton.latent_prefill import latent_prefill_attention
from tandem_kernels.triton.norm import rms_norm
from tandem_kernels.triton.tuning import num_multiprocessors


class LatentAttention:
    """Computes attention directly on the tokens' latents, without computing keys and values for
    each head."""

    def __init__(self, sizes: Latent, max_model_len: int) -> None:
        self._sizes = sizes
        self._max_model_len = max_model_len

    def attend(
        self, projected: torch.Tensor, at: LayerStep, on_kv_launched: Callable[[], object]
    ) -> torch.Tensor:
        """Returns the attention output, multiplied by W_v: [T, heads * value].

        A row of `projected` has the token's queries, or the latent of the queries, and then the
        token's KV.
        `on_kv_launched` is called when the kernel that writes the KV is launched.
        """
        sizes = self._sizes
        weights = at.weights.latent
        step = at.step
        assert weights is not None
        parts = [projected.shape[1] - sizes.kv_dim, sizes.kv_dim]
        queries, kv = torch.split(projected, parts, 1)
        heads = at.scaled(self._heads(queries, weights, at))
        layer_kv = at.kv.numbers
        rotated = rotate_and_store_latents(
            heads,
            kv,
            at.angles,
            step.slots[at.group],
            layer_kv,
            norm=weights.kv_norm,
            eps=LATENT_NORM_EPS,
        )
        on_kv_launched()
        plain = heads[..., : sizes.plain_dim]
        absorbed = linear_of_heads(plain, weights.keys)
        absorbed = at.lora.add_of_heads(at.index, "latent_keys", absorbed, plain)
        attended = self._attend(LatentQueries(absorbed, rotated), at)
        values = linear_of_heads(attended, weights.values)
        return at.lora.add_of_heads(at.index, "latent_values", values, attended).flatten(1)

    def _heads(self, queries: torch.Tensor, weights: LatentWeights, at: LayerStep) -> torch.Tensor:
        """Returns the queries before rotation, [T, heads, plain + rope]. The caller rotates the
        last `rope` elements of each head."""
        if weights.q_norm is not None and weights.q_out is not None:
            normed = rms_norm(queries, weights.q_norm, LATENT_NORM_EPS)
            queries = at.lora.add(at.index, "q_out", linear(normed, weights.q_out), normed)
        return queries.view(len(queries), -1, self._sizes.q_dim)

    def _attend(self, queries: LatentQueries, at: LayerStep) -> torch.Tensor:
        """Returns the attention output [T, heads, rank]. It is a weighted sum of latents, not yet
        multiplied by W_v."""
        num_tokens, num_heads, _ = queries.rotated.shape
        step = at.step
        num_single = step.shape.num_single
        parts = []
        block_tables = step.block_tables[at.group]
        if num_single:
            parts.append(
                latent_decode_attention(
                    queries.rows(0, num_single),
                    at.kv.numbers,
                    block_tables[:num_single],
                    step.context_lens[:num_single],
                    splits=choose_latent_splits(
                        num_single,
                        num_heads,
                        self._max_model_len,
                        num_multiprocessors(queries.rotated.device),
                    ),
                    scale=self._sizes.scale,
                )
            )
        if step.shape.num_chunks:
            parts.append(
                latent_prefill_attention(
                    queries.rows(num_single, num_tokens),
                    at.kv.numbers,
                    block_tables[num_single:],
                    step.context_lens[num_single:],
                    step.query_starts,
                    scale=self._sizes.scale,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
