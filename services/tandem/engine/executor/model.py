"""The decoder of the Llama family: Llama, Mistral, Qwen 2 and 3, by what their configs say.

    x = embedding[token]
    per layer:  x += W_o attention(rotate(q), rotate(k), v)     q, k, v = W_qkv norm(x)
                x += W_down (silu(gate) * up)                   gate, up = W_gate_up norm(x)
    logits = W_out norm(x)

Qwen 3 normalizes each head of q and k before the rotation. Attention may have a sliding window.
Knows tensors and the KV pool; no sequences, no scheduling.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import silu

from tandem.engine.executor.step_inputs import StepInputs
from tandem.engine.executor.weights import LayerWeights, Linear, ModelWeights
from tandem.models.config import ModelConfig
from tandem_kernels.dispatch import Angles, Kernels
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.rope import rotary_angles, rotary_frequencies, scale_llama3, scale_yarn


class Decoder:
    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: Kernels) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._dtype = weights.embedding.dtype
        self._frequencies = rope_frequencies(config).to(weights.embedding.device)
        scaling = config.rope_scaling
        self._angle_scale = scaling.attention_factor if scaling else 1.0
        self.final_hidden = weights.embedding[:0]  # what the last step's logits were made of

    def forward(
        self,
        inputs: StepInputs,
        pool: KvPool,
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Writes the tokens' KV; fp32 logits [rows of inputs.logit_rows, vocab].

        `on_kv_written` is called when the last layer's KV is in the pool (on CUDA: will be, by what
        is in the stream), with the last layer's attention, its MLP and the logits still to come.
        """
        attention = self._kernels.attention(
            inputs.spans,
            pool,
            self._config.num_attention_heads,
            self._dtype,
            self._config.sliding_window,
        )
        angles = rotary_angles(inputs.positions, self._frequencies, self._angle_scale)
        x = self._weights.embedding[inputs.token_ids]
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(x, layer.attention_norm)
            queries = self._store_kv(index, layer, normed, angles, inputs, pool)
            if on_kv_written is not None and layer is self._weights.layers[-1]:
                on_kv_written()
            attended = attention(index, queries).flatten(1)
            x = x + self._project(attended, (layer.attention_out,))
            x = x + self._mlp(layer, self._norm(x, layer.mlp_norm))
        return self._logits(x, inputs.logit_rows)

    def _store_kv(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        angles: Angles,
        inputs: StepInputs,
        pool: KvPool,
    ) -> torch.Tensor:
        """Queries [rows, heads, D], rotated; K and V of the tokens go into the pool."""
        num_heads, num_kv_heads = self._config.num_attention_heads, self._config.num_kv_heads
        heads = self._project(x, layer.qkv).view(x.shape[0], -1, self._config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            normed_queries = self._norm(heads[:, :num_heads], layer.q_norm)
            normed_keys = self._norm(heads[:, num_heads:-num_kv_heads], layer.k_norm)
            rotated = self._kernels.rotate(torch.cat((normed_queries, normed_keys), 1), angles)
        else:
            rotated = self._kernels.rotate(heads[:, :-num_kv_heads], angles)
        tokens = slice(0, inputs.num_tokens)
        keys, values = rotated[tokens, num_heads:], heads[tokens, -num_kv_heads:]
        pool.write(index, inputs.token_rows, keys, values)
        return rotated[:, :num_heads]

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._project(x, layer.gate_up).chunk(2, dim=-1)
        return self._project(silu(gate).mul_(up), (layer.down,))

    def _logits(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        num_padding = -rows.shape[0] % self._kernels.row_multiple
        last = x[torch.nn.functional.pad(rows, (0, num_padding))]
        normed = self._norm(last, self._weights.final_norm)
        self.final_hidden = normed[: rows.shape[0]]
        logits = self._kernels.linear(normed, self._weights.output, None)
        return logits[: rows.shape[0]].float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, weight, self._config.rms_norm_eps)

    def _project(self, x: torch.Tensor, parts: tuple[Linear, ...]) -> torch.Tensor:
        """Returns the products [rows, columns of all parts side by side]."""
        if len(parts) == 1:
            return self._kernels.linear(x, parts[0].weight, parts[0].bias)
        out = x.new_empty(x.shape[0], sum(part.weight.shape[0] for part in parts))
        first = 0
        for part in parts:
            width = part.weight.shape[0]
            self._kernels.linear(x, part.weight, part.bias, out=out[:, first : first + width])
            first += width
        return out


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Returns rotary frequencies [head_dim / 2], scaled as the config says."""
    frequencies = rotary_frequencies(config.head_dim, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return scale_llama3(
            frequencies,
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_len=scaling.original_max_position_embeddings,
        )
    return scale_yarn(
        frequencies,
        theta=config.rope_theta,
        factor=scaling.factor,
        original_len=scaling.original_max_position_embeddings,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        truncate=scaling.truncate,
    )
