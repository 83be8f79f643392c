"""The decoder of torch/decoder.py with Triton kernels that fuse several operations:

    operation                    computed by
    x += norm(delta); norm(x)    one kernel. `delta` is the output of the preceding attention or
                                 MLP, which some models normalize.
    q, k, v                      one product (products.py)
    attention                    attention.py, or latent.py for latent attention
    silu(gate) * up, relu(up)^2  one kernel
    experts                      experts.py
    indexers                     indexers.py
    layers with a state          states.py

The decoder only creates views and launches kernels. It never waits for the device, so a CUDA graph
can record a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tandem.engine.cache.layout.kv_groups import layer_places, state_places
from tandem.engine.executor.collectives import ALONE, Collectives, inputs_of, whole_of
from tandem.engine.executor.torch.decoder import (
    embedding_multiplier,
    final_logits,
    gathered_heads,
    own_heads,
    query_factors_of,
    rope_tables,
)
from tandem.engine.executor.torch.lora import NO_LORA, AddsLora, ProductName
from tandem.engine.executor.triton.attention import HeadAttention, LayerStep
from tandem.engine.executor.triton.experts import StackedExperts
from tandem.engine.executor.triton.indexers import StepIndexers
from tandem.engine.executor.triton.inputs import StepViews
from tandem.engine.executor.triton.latent import LatentAttention
from tandem.engine.executor.triton.products import product, project
from tandem.engine.executor.triton.states import state_layer
from tandem.engine.executor.weights.decoder_weights import (
    ExpertWeights,
    LayerWeights,
    Linear,
    Mlp,
    ModelWeights,
)
from tandem.engine.executor.weights.expand import embedded
from tandem.models.config.experts import Experts
from tandem.models.config.linear_attention import GatedDelta
from tandem.models.config.model import ModelConfig
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.rope import rotary_angles
from tandem_kernels.state_pool import Pool, StatePool
from tandem_kernels.triton.activation import gated_mul, relu_squared
from tandem_kernels.triton.expert_choice import choose_experts
from tandem_kernels.triton.norm import add_rms_norm, rms_norm


def _nothing() -> None:
    """Does nothing; the default of `on_kv_launched`."""


class TritonDecoder:
    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        max_model_len: int,
        ranks: Collectives = ALONE,
    ) -> None:
        """`config` is the whole model's. `weights` is the share of one of `ranks`."""
        self._config = config = ranks.share.config(config)
        self._ranks = ranks
        self._experts: list[StackedExperts | None] = []
        self._weights = weights = replace(
            weights, layers=tuple(map(self._with_stacked_experts, weights.layers))
        )
        self._attention: HeadAttention | LatentAttention = (
            HeadAttention(config, max_model_len)
            if config.latent is None
            else LatentAttention(config.latent, max_model_len)
        )
        self._places = layer_places(config)
        self._state_places = state_places(config)
        self._max_model_len = max_model_len
        device = weights.device
        ropes = dict.fromkeys(layer.rope for layer in config.layers)
        self._frequencies = {rope: rope_tables(rope, config.rope_dim, device) for rope in ropes}
        clamp = config.gate_clamp
        self._clamp = (clamp.alpha, clamp.limit) if clamp else None
        factors = config.layer_factors
        self._gate_factors = (factors.gate, factors.down) if factors else (1.0, 1.0)
        self._embedding_multiplier = embedding_multiplier(config, weights.embedding.dtype)
        # The output of the final norm for each row of the last step's logits: [rows, hidden]. A
        # step that replays a CUDA graph does not set this attribute.
        dtype = weights.embedding.dtype
        self.final_hidden = torch.empty(0, config.hidden_size, dtype=dtype, device=device)

    def forward(
        self,
        step: StepViews,
        pools: Sequence[Pool],
        on_kv_launched: Callable[[], object] = _nothing,
        lora: AddsLora = NO_LORA,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes a step. Writes the tokens' KV to `pools`, one pool for each KV group. Returns
        this rank's share of the fp32 logits, [rows of step.logit_rows, share of the vocabulary]: in
        `out` if it is given.

        `on_kv_launched` is called when all kernels that write KV are launched; with several ranks,
        when this rank has also heard from all others after theirs.
        """
        specs = self._config.layers
        angles = {
            rope: rotary_angles(step.positions, *tables)
            for rope, tables in self._frequencies.items()
        }
        factors = {rope: query_factors_of(rope, step.positions) for rope in self._frequencies}
        x = embedded(self._weights, step.token_ids)
        if x.shape[1] < self._config.hidden_size:
            x = self._ranks.gather(x, self._config.hidden_size)
        if self._embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        indexers = None
        if self._config.index_keys is not None:
            (pool,) = pools
            assert isinstance(pool, KvPool)
            indexers = StepIndexers(self._config, pool, step, self._max_model_len)
        delta: torch.Tensor | None = None
        post_norm: torch.Tensor | None = None  # the norm of delta
        layers = zip(
            *(specs, self._places, self._state_places, self._weights.layers, self._experts),
            strict=True,
        )
        for index, (spec, place, state_place, layer, stacked) in enumerate(layers):
            is_last = index + 1 == self._config.num_layers
            tell_launched = on_kv_launched if is_last and self._ranks is ALONE else _nothing
            if place is None and state_place is None:
                tell_launched()
            else:
                assert layer.attention_out is not None
                normed = self._add_norm(x, delta, post_norm, layer.attention_norm)
                projected = self._project_qkv(normed, index, layer, lora)
                if state_place is not None:
                    states = pools[state_place.group]
                    assert isinstance(states, StatePool)
                    assert spec.linear is not None
                    assert layer.state is not None
                    num_own = 0 if place is None else self._config.num_qkv
                    linear = spec.linear
                    if isinstance(linear, GatedDelta):  # ranks share no others
                        linear = linear.of_rank(self._ranks.share.num_ranks)
                    attended = of_state = state_layer(
                        linear,
                        layer.state,
                        projected[:, num_own:],
                        step,
                        state_place.group,
                        states.matrices(state_place.number),
                        states.convs(state_place.number),
                        self._config.rms_norm_eps,
                    )
                    projected = projected[:, :num_own]
                if place is None:
                    tell_launched()
                else:
                    pool = pools[place.group]
                    assert isinstance(pool, KvPool)
                    choose = None
                    if indexers is not None:
                        choose = indexers.of_layer(index, layer.indexer, normed, angles[spec.rope])
                    attended = self._attention.attend(
                        projected,
                        LayerStep(
                            step,
                            layer,
                            spec.window,
                            place.group,
                            pool.layer(place.number),
                            angles[spec.rope],
                            factors[spec.rope],
                            index,
                            lora,
                            choose,
                        ),
                        tell_launched,
                    )
                    if layer.attention_gate is not None:
                        gates = product(normed, layer.attention_gate)
                        gates = gates.repeat_interleave(attended.shape[1] // gates.shape[1], 1)
                        attended = attended * torch.sigmoid(gates)
                    if state_place is not None:
                        attended = torch.cat((attended, of_state), 1)
                delta = whole_of(
                    self._ranks,
                    self._config.hidden_size,
                    self._out(index, "attention_out", layer.attention_out, attended, lora),
                )
                post_norm = layer.attention_post_norm
            if is_last and self._ranks is not ALONE:
                on_kv_launched()
            if layer.mlp is None:
                continue
            normed = self._add_norm(x, delta, post_norm, layer.mlp_norm)
            if isinstance(layer.mlp, Mlp):
                delta = whole_of(
                    self._ranks, self._config.hidden_size, self._mlp(index, layer.mlp, normed, lora)
                )
            else:
                assert spec.experts is not None
                assert stacked is not None
                delta = self._mix(index, spec.experts, stacked, layer.mlp, normed, lora)
            post_norm = layer.mlp_post_norm
        assert delta is not None
        rows = step.logit_rows
        final = self._add_norm(x[rows], delta[rows], post_norm, self._weights.final_norm)
        self.final_hidden = final
        output = Linear(self._weights.output, None, self._weights.output_blocks)
        logits = product(final, output)
        logits = logits.float() if out is None else out.copy_(logits)
        return final_logits(self._config, logits)

    def _with_stacked_experts(self, layer: LayerWeights) -> LayerWeights:
        """Stores the experts of the next layer in `self._experts`. Returns the layer without them,
        so that memory has each expert once."""
        if not isinstance(layer.mlp, ExpertWeights):
            self._experts.append(None)
            return layer
        self._experts.append(StackedExperts.of(layer.mlp))
        return replace(layer, mlp=replace(layer.mlp, mlps=()))

    def _out(
        self, index: int, name: ProductName, matrix: Linear, x: torch.Tensor, lora: AddsLora
    ) -> torch.Tensor:
        """Multiplies activations, of which this rank has computed `x`, by a matrix whose product is
        added to the residual stream. Returns this rank's share of the product."""
        x = inputs_of(self._ranks, x, matrix.weight.shape[1])
        return lora.add(index, name, product(x, matrix), x)

    def _mlp(self, index: int, mlp: Mlp, x: torch.Tensor, lora: AddsLora) -> torch.Tensor:
        """Returns this rank's share of the output."""
        gated = self._gated(lora.add(index, "gate_up", project(x, mlp.gate_up), x))
        return self._out(index, "down", mlp.down, gated, lora)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self._config.has_gates:
            return relu_squared(gate_up)
        return gated_mul(gate_up, self._config.activation, self._clamp, self._gate_factors)

    def _mix(
        self,
        index: int,
        experts: Experts,
        stacked: StackedExperts,
        weights: ExpertWeights,
        x: torch.Tensor,
        lora: AddsLora,
    ) -> torch.Tensor:
        """Returns, for each row of x, the weighted sum of the outputs of the experts chosen for the
        row, plus the output of the shared MLP."""
        share = self._ranks.share
        width = self._config.hidden_size
        router = weights.router
        logits = product(x.to(router.weight.dtype), router)
        groups = experts.groups
        chosen, shares = choose_experts(
            logits,
            experts.top_k,
            is_normalized=experts.is_normalized,
            groups=(groups.num, groups.top) if groups else None,
            scale=experts.scale,
            has_sigmoids=experts.has_sigmoids,
            correction=weights.correction,
        )
        shared = None if weights.shared is None else self._mlp(index, weights.shared, x, lora)
        if shared is not None and weights.shared_gate is not None:
            shared = shared * torch.sigmoid(product(x, weights.shared_gate))
        if share.splits_experts:
            first = share.of(experts.num).start
            own = stacked.mix(x, chosen, shares, self._gated, None, first, experts.num)
            whole = self._ranks.sum(own)
            return whole if shared is None else whole + whole_of(self._ranks, width, shared)
        mixed = stacked.mix(
            x,
            chosen,
            shares,
            lambda gate_up: inputs_of(self._ranks, self._gated(gate_up), stacked.num_inner),
            shared,
        )
        return whole_of(self._ranks, width, mixed)

    def _add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        post_norm: torch.Tensor | None,
        norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Adds `delta`, the output of attention or of the MLP, to x in place. Before, `delta` is
        normalized with the weights `post_norm` and multiplied by the model's residual multiplier.
        Then returns the rows of x after RMSNorm with the weights `norm`.

        If `delta` is None, nothing is added. Weights that are None stand for no norm.
        """
        eps = self._config.rms_norm_eps
        multiplier = self._config.multipliers.residual
        if delta is None:
            return x if norm is None else rms_norm(x, norm, eps)
        return add_rms_norm(
            x, delta, norm, eps, delta_weight=post_norm, delta_multiplier=multiplier
        )

    def _project_qkv(
        self, x: torch.Tensor, index: int, layer: LayerWeights, lora: AddsLora
    ) -> torch.Tensor:
        """Returns the product of a layer's first matrices (`LayerWeights.qkv`), such as q, k and v
        side by side. If the model normalizes q and k over all heads of a row together, they are
        normalized here. Norms of single heads are computed in attention.py."""
        qkv = lora.add(index, "qkv", project(x, layer.qkv), x)
        if layer.projected_factors is not None:
            qkv.mul_(layer.projected_factors)
        if self._config.qk_norm == "all" and layer.q_norm is not None:
            assert layer.k_norm is not None
            num_queries = self._config.num_attention_heads * self._config.head_dim
            num_keys = self._config.num_kv_heads * self._config.head_dim
            queries, keys, _ = torch.split(qkv, [num_queries, num_keys, num_keys], 1)
            eps = self._config.rms_norm_eps
            for own, weight in ((queries, layer.q_norm), (keys, layer.k_norm)):
                if self._ranks is ALONE:
                    rms_norm(own, weight, eps, out=own)
                else:
                    normed = rms_norm(gathered_heads(self._ranks, own, len(weight)), weight, eps)
                    own.copy_(own_heads(self._ranks.share, normed, own.shape[1]))
        return qkv
