"""The same decoder as model.py, on the fused Triton kernels.

    x += delta, normed     one kernel: residual and norm       delta: what the part before adds
    q, k, v                one product      (triton_product.py)
    attention              triton_attention.py; triton_latent.py with latents
    silu(gate) * up        one kernel

Norms after attention and the MLP, and norms of all heads as one, are kernels of their own. Experts
are in triton_experts.py.

Only views and launches, nothing that waits for the device: a CUDA graph can record it.
"""

from collections.abc import Callable, Sequence

import torch

from tandem.engine.cache.kv_groups import layer_places
from tandem.engine.executor.expand import embedded
from tandem.engine.executor.model import (
    choose,
    embedding_multiplier,
    final_logits,
    rope_tables,
)
from tandem.engine.executor.step_lora import NO_LORA, AddsLora
from tandem.engine.executor.triton_attention import HeadAttention, LayerStep
from tandem.engine.executor.triton_experts import StackedExperts
from tandem.engine.executor.triton_inputs import StepViews
from tandem.engine.executor.triton_latent import LatentAttention
from tandem.engine.executor.triton_product import product
from tandem.engine.executor.weights import (
    ExpertWeights,
    LayerWeights,
    Linear,
    Mlp,
    ModelWeights,
)
from tandem.models.config.experts import Experts
from tandem.models.config.model import ModelConfig
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.rope import rotary_angles
from tandem_kernels.triton.activation import gated_mul
from tandem_kernels.triton.norm import add_rms_norm, rms_norm


def _nothing() -> None:
    """Waits for nobody."""


class TritonDecoder:
    def __init__(self, config: ModelConfig, weights: ModelWeights, max_model_len: int) -> None:
        self._config = config
        self._weights = weights = weights.loaded()
        self._attention: HeadAttention | LatentAttention = (
            HeadAttention(config, max_model_len)
            if config.latent is None
            else LatentAttention(config.latent, max_model_len)
        )
        self._places = layer_places(config)
        device = weights.device
        ropes = dict.fromkeys(layer.rope for layer in config.layers)
        self._frequencies = {rope: rope_tables(rope, config.rope_dim, device) for rope in ropes}
        self._experts = [
            StackedExperts.of(layer.mlp) if isinstance(layer.mlp, ExpertWeights) else None
            for layer in weights.layers
        ]
        clamp = config.gate_clamp
        self._clamp = (clamp.alpha, clamp.limit) if clamp else None
        self._embedding_multiplier = embedding_multiplier(config, weights.embedding.dtype)
        # What the last step's logits were made of; a step that is replayed does not set it.
        dtype = weights.embedding.dtype
        self.final_hidden = torch.empty(0, config.hidden_size, dtype=dtype, device=device)

    def forward(
        self,
        step: StepViews,
        pools: Sequence[KvPool],
        on_kv_launched: Callable[[], object] = _nothing,
        lora: AddsLora = NO_LORA,
    ) -> torch.Tensor:
        """Writes the tokens' KV; fp32 logits [rows of step.logit_rows, vocab].

        `pools` are those of the KV groups.
        `on_kv_launched` is called when all that writes KV is in the stream.
        """
        specs, eps = self._config.layers, self._config.rms_norm_eps
        angles = {
            rope: rotary_angles(step.positions, *tables)
            for rope, tables in self._frequencies.items()
        }
        x = embedded(self._weights, step.token_ids)
        if self._embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        delta: torch.Tensor | None = None
        layers = zip(specs, self._places, self._weights.layers, self._experts, strict=True)
        for index, (spec, place, layer, stacked) in enumerate(layers):
            normed = self._add_norm(x, delta, layer.attention_norm)
            layer_kv = pools[place.group].layer(place.number)
            is_last = index + 1 == self._config.num_layers
            attended = self._attention.attend(
                self._project_qkv(normed, index, layer, lora),
                LayerStep(
                    step,
                    layer,
                    spec.window,
                    place.group,
                    layer_kv,
                    angles[spec.rope],
                    index,
                    lora,
                ),
                on_kv_launched if is_last else _nothing,
            )
            delta = _project(attended, (layer.attention_out,))
            delta = lora.add(index, "attention_out", delta, attended)
            delta = self._scaled(delta, layer.attention_post_norm)
            normed = self._add_norm(x, delta, layer.mlp_norm)
            if isinstance(layer.mlp, Mlp):
                delta = self._mlp(index, layer.mlp, normed, lora)
            else:
                assert spec.experts is not None
                assert stacked is not None
                delta = self._mix(index, spec.experts, stacked, layer.mlp, normed, lora)
            delta = self._scaled(delta, layer.mlp_post_norm)
        assert delta is not None
        last, last_delta = x[step.logit_rows], delta[step.logit_rows]
        final = add_rms_norm(last, last_delta, self._weights.final_norm, eps)
        self.final_hidden = final
        output = Linear(self._weights.output, None, self._weights.output_blocks)
        return final_logits(self._config, product(final, output).float())

    def _mlp(self, index: int, mlp: Mlp, x: torch.Tensor, lora: AddsLora) -> torch.Tensor:
        gated = self._gated(lora.add(index, "gate_up", _project(x, mlp.gate_up), x))
        return lora.add(index, "down", _project(gated, (mlp.down,)), gated)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated_mul(gate_up, self._config.activation, self._clamp)

    def _mix(
        self,
        index: int,
        experts: Experts,
        stacked: StackedExperts,
        weights: ExpertWeights,
        x: torch.Tensor,
        lora: AddsLora,
    ) -> torch.Tensor:
        """Returns the weighted sum of each row's experts, and what the shared MLP gives."""
        router = weights.router
        logits = product(x.to(router.weight.dtype), router)
        chosen, shares = choose(self._config.expert_form, experts, logits, weights.correction)
        mixed = stacked.mix(x, chosen, shares, self._gated)
        if weights.shared is not None:
            mixed += self._mlp(index, weights.shared, x, lora)
        return mixed.to(x.dtype)

    def _add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Adds delta, if any, to x in place; returns the sum's normalized rows, or the sum itself
        where a layer has no norm."""
        if norm is None:
            return x if delta is None else x.add_(delta)
        eps = self._config.rms_norm_eps
        return rms_norm(x, norm, eps) if delta is None else add_rms_norm(x, delta, norm, eps)

    def _scaled(self, delta: torch.Tensor, post_norm: torch.Tensor | None) -> torch.Tensor:
        """Returns what is added to the residual stream."""
        if post_norm is not None:
            delta = rms_norm(delta, post_norm, self._config.rms_norm_eps)
        multiplier = self._config.multipliers.residual
        return delta if multiplier == 1.0 else delta * multiplier

    def _project_qkv(
        self, x: torch.Tensor, index: int, layer: LayerWeights, lora: AddsLora
    ) -> torch.Tensor:
        """Returns q, k and v side by side; q and k normalized if that is done over all heads."""
        qkv = lora.add(index, "qkv", _project(x, layer.qkv), x)
        if self._config.qk_norm == "all":
            assert layer.q_norm is not None
            assert layer.k_norm is not None
            first = 0
            for weight in (layer.q_norm, layer.k_norm):
                part = qkv[:, first : first + weight.shape[0]]
                part.copy_(rms_norm(part, weight, self._config.rms_norm_eps))
                first += weight.shape[0]
        return qkv


def _project(x: torch.Tensor, parts: tuple[Linear, ...]) -> torch.Tensor:
    """Returns [rows, columns of all parts]; on a device tensors_by_name.py joins them."""
    if len(parts) == 1:
        return product(x, parts[0])
    return torch.cat([product(x, part) for part in parts], dim=1)
