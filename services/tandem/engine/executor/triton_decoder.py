"""The same decoder as model.py, on the fused Triton kernels; products with weights are torch's.

    x += delta, normed     one kernel: residual and norm       delta: what the part before adds
    q, k, v                one product
    rotate and store       one kernel: norms of heads, rope, cache write
    attention              one launch for single tokens, one for chunks
    silu(gate) * up        one kernel

Only views and launches, nothing that waits for the device: a CUDA graph can record it.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import embedding, linear

from tandem.engine.executor.model import rope_frequencies
from tandem.engine.executor.triton_inputs import StepViews
from tandem.engine.executor.weights import Linear, ModelWeights
from tandem.models.config import ModelConfig
from tandem_kernels.kv_cache import layer_of
from tandem_kernels.rope import rotary_angles
from tandem_kernels.triton.activation import silu_mul
from tandem_kernels.triton.decode_attention import choose_num_splits, decode_attention
from tandem_kernels.triton.norm import add_rms_norm, rms_norm
from tandem_kernels.triton.prefill_attention import prefill_attention
from tandem_kernels.triton.rope_cache import rotate_and_store


class TritonDecoder:
    def __init__(self, config: ModelConfig, weights: ModelWeights, max_model_len: int) -> None:
        self._config = config
        self._weights = weights
        self._max_model_len = max_model_len
        self._frequencies = rope_frequencies(config).to(weights.embedding.device)
        scaling = config.rope_scaling
        self._angle_scale = scaling.attention_factor if scaling else 1.0
        # What the last step's logits were made of; a step that is replayed does not set it.
        self.final_hidden = weights.embedding[:0]

    def forward(
        self,
        step: StepViews,
        kv: torch.Tensor,
        on_kv_launched: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """Writes the tokens' KV; fp32 logits [rows of step.logit_rows, vocab].

        `on_kv_launched` is called when all that writes KV is in the stream.
        """
        eps = self._config.rms_norm_eps
        angles = rotary_angles(step.positions, self._frequencies, self._angle_scale)
        x = embedding(step.token_ids, self._weights.embedding)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            if delta is None:
                normed = rms_norm(x, layer.attention_norm, eps)
            else:
                normed = add_rms_norm(x, delta, layer.attention_norm, eps)
            layer_kv = layer_of(kv, index)
            queries = rotate_and_store(
                _project(normed, layer.qkv),
                angles,
                step.slots,
                layer_kv,
                num_heads=self._config.num_attention_heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
            )
            if index == len(self._weights.layers) - 1:
                on_kv_launched()
            attended = self._attend(queries, step, layer_kv).flatten(1)
            delta = _project(attended, (layer.attention_out,))
            normed = add_rms_norm(x, delta, layer.mlp_norm, eps)
            delta = _project(silu_mul(_project(normed, layer.gate_up)), (layer.down,))
        assert delta is not None
        last, last_delta = x[step.logit_rows], delta[step.logit_rows]
        final = add_rms_norm(last, last_delta, self._weights.final_norm, eps)
        self.final_hidden = final
        return linear(final, self._weights.output).float()

    def _attend(
        self, queries: torch.Tensor, step: StepViews, layer_kv: torch.Tensor
    ) -> torch.Tensor:
        num_single, window = step.shape.num_single, self._config.sliding_window
        parts = []
        if num_single:
            num_splits = choose_num_splits(
                num_single,
                layer_kv.shape[1],
                min(self._max_model_len, window or self._max_model_len),
                queries.device,
            )
            parts.append(
                decode_attention(
                    queries[:num_single],
                    layer_kv,
                    step.block_tables[:num_single],
                    step.context_lens[:num_single],
                    num_splits=num_splits,
                    window=window,
                )
            )
        if step.shape.num_chunks:
            parts.append(
                prefill_attention(
                    queries[num_single:],
                    layer_kv,
                    step.block_tables[num_single:],
                    step.context_lens[num_single:],
                    step.query_starts,
                    window,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _project(x: torch.Tensor, parts: tuple[Linear, ...]) -> torch.Tensor:
    """Returns [rows, columns of all parts]; on a device they are one matrix (weights.py)."""
    if len(parts) == 1:
        return linear(x, parts[0].weight, parts[0].bias)
    return torch.cat([linear(x, part.weight, part.bias) for part in parts], dim=1)
