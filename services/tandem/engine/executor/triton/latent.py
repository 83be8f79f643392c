"""Computes the latent attention of a layer (tandem/models/config/latent.py) with the Triton
kernels, in five operations:

1. Normalize the KV latents, rotate the keys, and store the KV, in one kernel. In models in which
   queries have a latent too, the same kernel normalizes it.
2. Compute the queries. Latents of queries are multiplied by W_q. In models without them, the input
   already has the queries.
3. Multiply the unrotated elements of the queries by W_k^T, all heads in one product. The results
   are called absorbed queries.
4. Compute the attention: one launch for sequences with one token, and one launch for chunks. It
   rotates the other elements of the queries. If an indexer chooses the keys (indexers.py), the
   attention of all rows is one launch.
5. Multiply the attention output by W_v, all heads in one product. If contexts are cut into ranges,
   the kernel that combines them computes the products.

From the layer's input to its attention's output these are 8 launches in a step of single tokens,
with the norm, the projection before and the projection after. LoRA adapters of W_v need the
attention output, so it is not combined and multiplied in one launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from tandem.engine.executor.torch.lora import NO_LORA
from tandem.engine.executor.triton.attention import LayerStep
from tandem.engine.executor.weights.decoder_weights import LATENT_NORM_EPS, LatentWeights
from tandem.models.config.latent import Latent
from tandem_kernels.linear import linear_of_heads
from tandem_kernels.triton.key_choice import ChosenKeys
from tandem_kernels.triton.latent_cache import norm_and_store_latents
from tandem_kernels.triton.latent_decode import (
    choose_latent_splits,
    latent_decode_attention,
    values_of_heads,
)
from tandem_kernels.triton.latent_loop import LatentQueries
from tandem_kernels.triton.latent_prefill import latent_prefill_attention
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
        cosines, sines = (angle.contiguous() for angle in at.angles)
        normed = norm_and_store_latents(
            kv,
            (cosines, sines),
            step.slots[at.group],
            at.kv.numbers,
            norm=weights.kv_norm,
            eps=LATENT_NORM_EPS,
            queries=None if weights.q_norm is None else queries,
            q_norm=weights.q_norm,
        )
        chosen = None if at.choose is None else at.choose(normed)
        on_kv_launched()
        if normed is not None:
            assert weights.q_out is not None
            queries = at.lora.add(at.index, "q_out", linear(normed, weights.q_out), normed)
        heads = at.scaled(queries.view(len(queries), -1, sizes.q_dim))
        plain, turning = torch.split(heads, [sizes.plain_dim, sizes.rope_dim], -1)
        absorbed = linear_of_heads(plain, weights.keys)
        absorbed = at.lora.add_of_heads(at.index, "latent_keys", absorbed, plain)
        return self._attend(LatentQueries(absorbed, turning, cosines, sines), weights, at, chosen)

    def _attend(
        self,
        queries: LatentQueries,
        weights: LatentWeights,
        at: LayerStep,
        chosen: ChosenKeys | None,
    ) -> torch.Tensor:
        """Returns the attention output, multiplied by W_v: [T, heads * value]."""
        num_tokens, num_heads, _ = queries.absorbed.shape
        step = at.step
        num_single = step.shape.num_single
        block_tables = step.block_tables[at.group]
        values = weights.values if at.lora is NO_LORA else None

        def decode(
            queries: LatentQueries,
            block_tables: torch.Tensor,
            context_lens: torch.Tensor,
            num_keys_max: int,
        ) -> torch.Tensor:
            return latent_decode_attention(
                queries,
                at.kv.numbers,
                block_tables,
                context_lens,
                splits=choose_latent_splits(
                    len(context_lens),
                    num_heads,
                    num_keys_max,
                    num_multiprocessors(queries.absorbed.device),
                ),
                scale=self._sizes.scale,
                values=values,
                chosen=chosen,
            )

        parts = []
        if chosen is not None:
            tables, _, lens = chosen.places
            parts.append(decode(queries, tables, lens, chosen.num_keys_max))
        elif num_single:
            parts.append(
                decode(
                    queries.rows(0, num_single),
                    block_tables[:num_single],
                    step.context_lens[:num_single],
                    self._max_model_len,
                )
            )
        if step.shape.num_chunks and chosen is None:
            latents = latent_prefill_attention(
                queries.rows(num_single, num_tokens),
                at.kv.numbers,
                block_tables[num_single:],
                step.context_lens[num_single:],
                step.query_starts,
                scale=self._sizes.scale,
            )
            parts.append(latents if values is None else values_of_heads(latents, values))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        if values is None:
            latents, attended = attended, values_of_heads(attended, weights.values)
            attended = at.lora.add_of_heads(at.index, "latent_values", attended, latents)
        return attended.flatten(1)
