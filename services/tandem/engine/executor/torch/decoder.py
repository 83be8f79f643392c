"""The decoder for all model families, controlled by the model's config.

    x = embedding[token]
    per layer:  x += W_o attention(rotate(q), rotate(k), v)     with q, k, v = W_qkv norm(x)
                x += W_down (silu(gate) * up)                   with gate, up = W_gate_up norm(x)
    logits = W_out norm(x)

Some model families add norms after attention and the MLP, norms of q and k, layers with a window or
without rotation, and constant factors (models/config/families.py). In other families, a layer has
several MLPs, called experts, and a router that chooses some of them for each token. Layers with
linear attention keep a state (models/config/linear_attention.py).

The decoder works on tensors and the KV pool. It knows neither sequences nor scheduling.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import gelu, relu, silu

from tandem.engine.cache.layout.kv_groups import layer_places, state_places
from tandem.engine.executor.collectives import ALONE, Collectives, inputs_of, whole_of
from tandem.engine.executor.sharded_logits import whole_logits
from tandem.engine.executor.torch.alt_up import AltUpStreams, sparse_gates
from tandem.engine.executor.torch.indexers import StepIndexers
from tandem.engine.executor.torch.inputs import StepInputs
from tandem.engine.executor.torch.lora import NO_LORA, ProductName, StepLora
from tandem.engine.executor.weights.decoder_weights import (
    LATENT_NORM_EPS,
    ExpertWeights,
    LatentWeights,
    LayerInputWeights,
    LayerWeights,
    Linear,
    Mlp,
    ModelWeights,
    StateWeights,
)
from tandem.engine.executor.weights.expand import embedded, pieces
from tandem.engine.executor.weights.share import Share
from tandem.models.config.experts import Experts
from tandem.models.config.layers import Heads, LayerSpec
from tandem.models.config.linear_attention import (
    GatedDelta,
    KimiDelta,
    LinearAttention,
    Mamba2,
    ShortConv,
)
from tandem.models.config.model import GateClamp, ModelConfig
from tandem.models.config.rope import Rope
from tandem_kernels.attention_groups import QuerySpan
from tandem_kernels.causal_conv import causal_conv1d
from tandem_kernels.dispatch import Angles, Attention, Kernels
from tandem_kernels.experts import choose_experts, choose_in_groups
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.linear_attention import StateSpan, delta_gates
from tandem_kernels.norm import gated_rms_norm, rms_norm_of_gated
from tandem_kernels.rope import (
    query_factors,
    rotary_angles,
    rotary_frequencies,
    scale_llama3,
    scale_longrope,
    scale_yarn,
)
from tandem_kernels.state_pool import Pool, StatePool

_VECTOR = 32  # largest number of elements that torch computes at once, or a multiple of it


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: Kernels,
        ranks: Collectives = ALONE,
    ) -> None:
        """`config` is the whole model's. `weights` is the share of one of `ranks`."""
        self._config = ranks.share.config(config)
        self._ranks = ranks
        self._weights = weights = weights.loaded()
        self._kernels = kernels
        self._dtype = weights.embedding.dtype
        device = weights.device
        dims = {layer: self._rope_dim(layer) for layer in config.layers}
        self._frequencies = {
            (layer.rope, dim): rope_tables(layer.rope, dim, device) for layer, dim in dims.items()
        }
        self._places = layer_places(config)
        self._state_places = state_places(config)
        self._embedding_multiplier = embedding_multiplier(config, self._dtype)
        self._alt_up = (
            AltUpStreams(config.alt_up, self._project, self._norm) if config.alt_up else None
        )
        # The output of the final norm for each row of the last step's logits: [rows, hidden].
        self.final_hidden = torch.empty(0, config.hidden_size, dtype=self._dtype, device=device)

    def forward(
        self,
        inputs: StepInputs,
        pools: Sequence[Pool],
        lora: StepLora,
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Computes a step. Writes the tokens' KV to the pools. Returns fp32 logits
        [rows of inputs.logit_rows, vocab].

        `on_kv_written` is called once, before the last layer's attention; with several ranks, after
        it, when this rank has heard from all others. At that point, on a CPU, the KV of all layers
        is in the pools. On CUDA, the kernels that write it were launched, but may not have
        finished.
        """
        specs, alt_up = self._config.layers, self._alt_up
        kv_pools = [pool for pool in pools if isinstance(pool, KvPool)]
        attentions = {
            (group, window, is_chunked): self._attention(
                inputs.spans[group], kv_pools[group], window, is_chunked
            )
            for group, window, is_chunked in dict.fromkeys(
                (place.group, spec.window, spec.is_chunked)
                for spec, place in zip(specs, self._places, strict=True)
                if place is not None
            )
        }
        indexers = None
        if self._config.index_keys is not None:
            (attend,) = attentions.values()
            indexers = StepIndexers(self._config, self._kernels, attend, kv_pools[0], inputs)
        all_angles = {
            key: rotary_angles(inputs.positions, *tables)
            for key, tables in self._frequencies.items()
        }
        factors = {rope: query_factors_of(rope, inputs.positions) for rope, _ in self._frequencies}
        x = embedded(self._weights, inputs.token_ids)
        if x.shape[1] < self._config.hidden_size:
            x = self._ranks.gather(x, self._config.hidden_size)
        if self._embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        for first, rows in inputs.given:
            x[first : first + len(rows)] = rows.to(x)
        layer_inputs = self._per_layer_inputs(inputs.token_ids, x)
        copies = self._weights.copies
        streams = [] if copies is None or alt_up is None else alt_up.start(x, copies.make)
        layers = zip(specs, self._places, self._state_places, self._weights.layers, strict=True)
        for index, (spec, place, state_place, layer) in enumerate(layers):
            if alt_up is not None and layer.alt_up is not None:
                streams = alt_up.predict(layer.alt_up, streams)
                x = alt_up.active(streams)
            tell_written = on_kv_written if index + 1 == self._config.num_layers else None
            before = x
            if place is None and state_place is None:
                if tell_written is not None:
                    tell_written()
            else:
                normed = self._norm_hidden(x, layer.attention_norm)
                projected = lora.add(index, "qkv", self._project(normed, layer.qkv), normed)
                if layer.projected_factors is not None:
                    projected = (projected * layer.projected_factors).to(projected.dtype)
                if state_place is not None:
                    states = pools[state_place.group]
                    assert isinstance(states, StatePool)
                    assert spec.linear is not None
                    assert layer.state is not None
                    num_own = 0 if place is None else self._config.num_qkv
                    of_state = self._state(
                        index,
                        spec.linear,
                        layer.state,
                        projected[:, num_own:],
                        states.matrices(state_place.number),
                        states.convs(state_place.number),
                        inputs.state_spans[state_place.group],
                        lora,
                    )
                    projected = projected[:, :num_own]
                if place is not None:
                    pool = kv_pools[place.group]
                    angles = all_angles[spec.rope, self._rope_dim(spec)]
                    query_latents = None
                    if layer.latent is None:
                        heads = self._heads(layer, spec, projected, angles, inputs.num_tokens)
                    else:
                        query_latents, heads = self._latent_heads(
                            index, layer.latent, projected, angles, inputs.num_tokens, lora
                        )
                    queries, keys, values = heads
                    if (factor := factors[spec.rope]) is not None:
                        queries = queries * factor.to(queries.dtype).view(-1, 1, 1)
                    if spec.kv_source is None:
                        pool.write(place.number, inputs.token_rows[place.group], keys, values)
                    if indexers is not None:
                        indexers.write_keys(index, layer.indexer, normed, angles)
                if tell_written is not None and self._ranks is ALONE:
                    tell_written()
                if place is not None:
                    choice = None
                    if indexers is not None:
                        choice = indexers.choice(
                            index, layer.indexer, normed, query_latents, angles
                        )
                    attend = attentions[place.group, spec.window, spec.is_chunked]
                    attended = attend(place.number, queries, layer.sinks, choice)
                    attended = attended[..., : self._config.value_dim]
                    if layer.latent is not None:
                        latents = attended[..., : layer.latent.values.shape[-1]]
                        attended = self._kernels.linear_of_heads(latents, layer.latent.values)
                        attended = lora.add_of_heads(index, "latent_values", attended, latents)
                    attended = attended.flatten(1)
                    if layer.attention_gate is not None:
                        gates = self._project(normed, (layer.attention_gate,))
                        gates = lora.add(index, "attention_gate", gates, normed)
                        gates = gates.repeat_interleave(attended.shape[1] // gates.shape[1], 1)
                        attended = attended * torch.sigmoid(gates)
                    attended = self._inputs_of_all(attended)
                if state_place is not None:
                    of_state = self._inputs_of_all(of_state)
                    attended = of_state if place is None else torch.cat((attended, of_state), 1)
                assert layer.attention_out is not None
                share = self._out(index, "attention_out", layer.attention_out, attended, lora)
                delta = whole_of(self._ranks, self._config.hidden_size, share)
                if tell_written is not None and self._ranks is not ALONE:
                    tell_written()
                x = self._added(x, delta, layer.attention_post_norm)
                if alt_up is not None and layer.laurel is not None:
                    x = (x + alt_up.laurel(layer.laurel, normed)) * 2**-0.5
            if layer.mlp is None:
                continue
            normed = self._norm_hidden(before if self._config.is_parallel else x, layer.mlp_norm)
            if isinstance(layer.mlp, Mlp):
                share = self._mlp(index, layer.mlp, normed, lora, spec=spec)
                delta = whole_of(self._ranks, self._config.hidden_size, share)
            else:
                assert spec.experts is not None
                delta = self._experts(index, spec.experts, layer.mlp, normed, x, lora)
            x = self._added(x, delta, layer.mlp_post_norm)
            if alt_up is not None and layer.alt_up is not None:
                streams = alt_up.correct(layer.alt_up, streams, x)
                x = alt_up.selecting(layer.alt_up, streams)
            if layer.layer_inputs is not None and layer_inputs is not None:
                added = self._layer_input(layer.layer_inputs, x, layer_inputs[:, index])
                streams[1:] = [each + added for each in streams[1:]]
                x = x + added
            if layer.scalar is not None:
                x = x * layer.scalar
        if alt_up is not None and copies is not None:
            x = alt_up.merge(streams, copies.merge)
        return self._logits(x, inputs.logit_rows, inputs.top_k)

    def _rope_dim(self, spec: LayerSpec) -> int:
        """Returns the number of elements of a head that RoPE may rotate."""
        return self._config.rope_dim if spec.heads is None else spec.heads.dim

    def _per_layer_inputs(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the inputs that tokens have for each layer, [T, layers, size]: the mean of their
        embedding for the layer and a projection of their embedding `x`, times the square root of 2.
        Returns None if the model has no such inputs."""
        weights, sizes = self._weights.per_layer, self._config.per_layer_inputs
        if weights is None or sizes is None:
            return None
        if sizes.vocab_size < self._config.vocab_size:
            token_ids = torch.where(token_ids < sizes.vocab_size, token_ids, 0)
        shape = (len(x), self._config.num_layers, sizes.size)
        scale = torch.tensor(sizes.size**0.5, dtype=x.dtype, device=x.device)
        embedded = (weights.embedding[token_ids] * scale).view(shape)
        projected = self._project(x, (weights.projection,)) * self._config.hidden_size**-0.5
        return (self._norm(projected.view(shape), weights.norm) + embedded) * 2**-0.5

    def _layer_input(
        self, weights: LayerInputWeights, x: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        """Returns what a layer adds to its output `x` from the tokens' `inputs` for this layer."""
        gate = self._project(x, (weights.gate,))
        gated = gelu(gate, approximate="tanh") if self._config.activation != "silu" else silu(gate)
        return self._norm(self._project(gated * inputs, (weights.projection,)), weights.norm)

    def _attention(
        self, spans: Sequence[QuerySpan], pool: KvPool, window: int | None, is_chunked: bool
    ) -> Attention:
        return self._kernels.attention(
            spans,
            pool,
            self._config.num_attention_heads,
            self._dtype,
            None if is_chunked else window,
            self._config.attention_scale,
            self._config.attention_cap,
            window if is_chunked else None,
        )

    def _heads(
        self,
        layer: LayerWeights,
        spec: LayerSpec,
        projected: torch.Tensor,
        angles: Angles,
        num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits `projected`, which has q, k and v side by side, into heads and rotates the queries
        and keys. Returns queries [rows, heads, D], keys [num_tokens, kv heads, D], and values of
        the same shape as the keys. A layer that reads the KV of an earlier layer has no keys and
        values of its own: [0, heads, D]."""
        num_heads = self._config.num_attention_heads
        own = self._config.heads_of(spec)
        num_kv_heads = own.num_kv
        norms_rotated = self._config.norms_rotated_heads
        projected = self._with_padded_values(projected, own)
        heads = projected.view(projected.shape[0], -1, own.dim)
        if spec.kv_source is not None:
            queries = self._kernels.rotate(self._norm(heads, layer.q_norm), angles)
            return queries, heads[:0], heads[:0]
        if layer.q_norm is not None and layer.k_norm is not None and norms_rotated:
            rotated = self._kernels.rotate(heads[:, :-num_kv_heads], angles)
            queries = self._norm(rotated[:, :num_heads], layer.q_norm)
            keys = self._norm(rotated[:, num_heads:], layer.k_norm)
            rotated = torch.cat((queries, keys), 1)
        elif layer.q_norm is not None and layer.k_norm is not None:
            normed_queries = self._norm_heads(heads[:, :num_heads], layer.q_norm)
            normed_keys = self._norm_heads(heads[:, num_heads:-num_kv_heads], layer.k_norm)
            rotated = self._kernels.rotate(torch.cat((normed_queries, normed_keys), 1), angles)
        else:
            rotated = self._kernels.rotate(heads[:, :-num_kv_heads], angles)
        tokens = slice(0, num_tokens)
        values = heads[tokens, -num_kv_heads:]
        if self._config.has_value_norms:
            values = self._norm(values, values.new_ones(own.dim))
        return rotated[:, :num_heads], rotated[tokens, num_heads:], values

    def _with_padded_values(self, projected: torch.Tensor, heads: Heads) -> torch.Tensor:
        """Returns q, k and v side by side, in which values have the size of keys. Smaller values
        are padded with zeros, and multiplied by the model's factor."""
        if self._config.value_dim is None:
            return projected
        num_values = heads.num_kv * self._config.value_dim
        others = projected[:, :-num_values]
        values = projected[:, -num_values:].view(len(projected), heads.num_kv, -1)
        padding = (0, heads.dim - self._config.value_dim)
        padded = torch.nn.functional.pad(values * self._config.value_scale, padding)
        return torch.cat((others, padded.flatten(1)), 1)

    def _latent_heads(
        self,
        index: int,
        weights: LatentWeights,
        projected: torch.Tensor,
        angles: Angles,
        num_tokens: int,
        lora: StepLora,
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Returns the latents of queries, and the queries, keys and values for latent attention
        (models/config/latent.py). The latents are None if the model's queries have none.

        A token's KV is one vector of D elements: the token's latent and then the rotated key. It
        serves as the key and as the value of all heads. So the keys and the values are the same
        tensor [num_tokens, 1, D]. The queries [rows, heads, D] are already multiplied by the key
        matrix, so the product of a query and a token's KV is the attention score.
        """
        latent = self._config.latent
        assert latent is not None
        queries, kv = torch.split(projected, [projected.shape[1] - latent.kv_dim, latent.kv_dim], 1)
        query_latents = None
        if weights.q_norm is not None and weights.q_out is not None:
            query_latents = self._kernels.rms_norm(queries, weights.q_norm, LATENT_NORM_EPS)
            queries = self._kernels.linear(query_latents, weights.q_out, None)
            queries = lora.add(index, "q_out", queries, query_latents)
        heads = queries.reshape(len(queries), -1, latent.q_dim)
        plain, turning = torch.split(heads, [latent.plain_dim, latent.rope_dim], -1)
        token, key = torch.split(kv, [latent.kv_rank, latent.rope_dim], 1)
        rotated = self._kernels.rotate(torch.cat((turning, key.unsqueeze(1)), 1), angles)
        absorbed = self._kernels.linear_of_heads(plain, weights.keys)
        absorbed = lora.add_of_heads(index, "latent_keys", absorbed, plain)
        normed = self._kernels.rms_norm(token, weights.kv_norm, LATENT_NORM_EPS)
        stored = torch.cat((normed, rotated[:, -1]), 1)[:num_tokens].unsqueeze(1)
        return query_latents, (torch.cat((absorbed, rotated[:, :-1]), -1), stored, stored)

    def _state(
        self,
        index: int,
        sizes: LinearAttention,
        weights: StateWeights,
        projected: torch.Tensor,
        states: torch.Tensor,
        conv_states: torch.Tensor,
        spans: Sequence[StateSpan],
        lora: StepLora,
    ) -> torch.Tensor:
        """Computes a layer that keeps a state up to its output matrix. `projected` is the product
        of its first matrices (`LayerWeights.qkv`). Updates the states of the spans. Returns the
        outputs of this rank's heads, [rows, outputs]."""
        heads = self._ranks.share.of(sizes.num_heads)
        sections = [len(channels) for channels in sizes.channels_of(heads)]

        def convolve(
            channels: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor] | None
        ) -> list[torch.Tensor]:
            biases = (
                [None] * len(sections)
                if weights.conv_bias is None
                else torch.split(weights.conv_bias, sections)
            )
            return [
                causal_conv1d(x, taps, bias, inputs, spans, activation)
                for x, taps, bias, inputs in zip(
                    torch.split(channels, sections, 1),
                    torch.split(weights.conv, sections),
                    biases,
                    torch.split(conv_states, sizes.head_sections, -1),
                    strict=True,
                )
            ]

        if isinstance(sizes, ShortConv):
            before, after, x = projected.chunk(3, 1)
            return after * convolve(before * x, None)[0]
        num_rows, num_heads = len(projected), len(heads)
        num_outputs = num_heads * sizes.value_dim
        assert weights.a_log is not None
        assert weights.dt_bias is not None
        if isinstance(sizes, Mamba2):
            assert weights.skip is not None
            z, channels, dt = torch.split(projected, [num_outputs, sum(sections), num_heads], 1)
            x, b, c = convolve(channels, silu)
            out = self._kernels.mamba2(
                x.view(num_rows, num_heads, -1),
                dt,
                self._keys_of_heads(sizes, b),
                self._keys_of_heads(sizes, c),
                weights.a_log,
                weights.skip,
                weights.dt_bias,
                (0.0, torch.inf),
                states,
                spans,
            )
            out = out.flatten(1)
            if weights.norm is None:
                out = (out.float() * silu(z.float().contiguous())).to(out.dtype)
            else:
                out = self._norm_of_gated(sizes, weights.norm, out, z)
            return out if weights.output_factor == 1.0 else out * weights.output_factor
        assert weights.norm is not None
        if isinstance(sizes, KimiDelta):
            assert weights.decay_out is not None
            assert weights.gate_out is not None
            channels, b, *narrow = torch.split(
                projected, [sum(sections), num_heads, sizes.dim, sizes.dim], 1
            )
            of_decays, of_gates = (each.contiguous() for each in narrow)
            a = self._project(of_decays, (weights.decay_out,))
            a = lora.add(index, "decay_out", a, of_decays)
            z = self._project(of_gates, (weights.gate_out,))
            z = lora.add(index, "gate_out", z, of_gates)
            a = a.view(num_rows, num_heads, -1)
            a_log, dt_bias = weights.a_log.unsqueeze(-1), weights.dt_bias.view(num_heads, -1)
        else:
            channels, z, b, a = torch.split(
                projected, [sum(sections), num_outputs, num_heads, num_heads], 1
            )
            a_log, dt_bias = weights.a_log, weights.dt_bias
        q, k, v = convolve(channels, silu)
        log_decay, beta = delta_gates(a, b, a_log, dt_bias)
        if isinstance(sizes, GatedDelta):
            beta = beta * sizes.rate_max
        out = self._kernels.gated_delta_rule(
            self._keys_of_heads(sizes, q),
            self._keys_of_heads(sizes, k),
            v.view(num_rows, -1, sizes.value_dim),
            log_decay,
            beta,
            states,
            spans,
        )
        gates = z.view(num_rows, num_heads, -1)
        eps = self._config.rms_norm_eps
        if isinstance(sizes, GatedDelta) and sizes.norm_eps is not None:
            eps = sizes.norm_eps
        activation = torch.sigmoid if isinstance(sizes, KimiDelta) else silu
        return gated_rms_norm(out, gates, weights.norm, eps, activation).flatten(1)

    def _keys_of_heads(self, sizes: LinearAttention, own: torch.Tensor) -> torch.Tensor:
        """Returns q or k for this rank's heads, [rows, heads, key dim], where equally many
        consecutive heads of the state share one of q or k. `own` has the channels of q or k in this
        rank's part of the states. If they are not those of its heads, the ranks exchange them."""
        share = self._ranks.share
        num = sizes.num_k_heads * sizes.key_dim
        if share.num_ranks == 1 or sizes.shares_nothing(share.num_ranks):
            return own.view(len(own), -1, sizes.key_dim)
        heads = share.of(sizes.num_heads)
        room = -(-num // sizes.num_heads) * len(heads)  # the last ranks may have fewer channels
        padded = torch.nn.functional.pad(own, (0, room - own.shape[1]))
        whole = self._ranks.gather(padded, room * share.num_ranks)[:, :num]
        of_heads = [head * sizes.num_k_heads // sizes.num_heads for head in heads]
        return whole.reshape(len(own), -1, sizes.key_dim)[:, of_heads]

    def _norm_of_gated(
        self, sizes: Mamba2, weight: torch.Tensor, out: torch.Tensor, z: torch.Tensor
    ) -> torch.Tensor:
        """Returns the norm of out * silu(z) over groups of heads. `out` and `z` are [rows, outputs]
        of this rank's heads. Ranks that share a group exchange both."""
        size, width = sizes.num_outputs // sizes.num_groups, out.shape[1]
        is_shared = len(weight) > width
        if is_shared:
            out, z = (self._ranks.gather(part, sizes.num_outputs) for part in (out, z))
        normed = rms_norm_of_gated(out, z, weight, self._config.rms_norm_eps, size)
        return own_heads(self._ranks.share, normed, width) if is_shared else normed

    def _out(
        self, index: int, product: ProductName, matrix: Linear, x: torch.Tensor, lora: StepLora
    ) -> torch.Tensor:
        """Multiplies activations by a matrix whose product is added to the residual stream. `x` are
        those that this rank's share of the matrix needs. Returns its share of the product."""
        return lora.add(index, product, self._project(x, (matrix,)), x)

    def _inputs_of_all(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the activations that this rank's share of a matrix needs. All ranks have computed
        equally many of them, this rank `own`."""
        return inputs_of(self._ranks, own, own.shape[1] * self._ranks.share.num_ranks)

    def _mlp(
        self,
        index: int,
        mlp: Mlp,
        x: torch.Tensor,
        lora: StepLora,
        *,
        is_whole: bool = False,
        spec: LayerSpec | None = None,
    ) -> torch.Tensor:
        """Returns this rank's share of the output; all of it if this rank has the whole MLP. `spec`
        is given for the dense MLP of a layer."""
        gate_up = lora.add(index, "gate_up", self._project(x, mlp.gate_up), x)
        if not self._config.has_gates:
            squares = relu(gate_up).square()
            if not is_whole:
                squares = inputs_of(self._ranks, squares, mlp.down.weight.shape[1])
            return lora.add(index, "down", self._project(squares, (mlp.down,)), squares)
        gate, up = gate_up.chunk(2, dim=-1)
        if self._ranks is not ALONE and not is_whole:
            # The bits of an activation function depend on whether torch computes an element in a
            # vector, that is, on the element's place in its row. So, to get the same bits for any
            # number of ranks, the function is applied to whole rows, as the only rank would.
            num_inner = mlp.down.weight.shape[1]
            parts = [inputs_of(self._ranks, part, num_inner) for part in (gate, up)]
            gate, up = torch.cat(parts, 1).chunk(2, dim=-1)
        if spec is not None and spec.sparsity:
            gate = self._sparse_gates(spec, gate)
        if self._config.gate_clamp is not None:
            gated = _gate_clamped(self._config.gate_clamp, gate, up)
        elif self._config.layer_factors is not None:
            gated = silu(gate * self._config.layer_factors.gate).mul_(up)
            gated = gated * self._config.layer_factors.down
        elif self._config.activation == "silu":
            gated = silu(gate).mul_(up)
        else:
            gated = gelu(gate, approximate="tanh").mul_(up)
        return lora.add(index, "down", self._project(gated, (mlp.down,)), gated)

    def _sparse_gates(self, spec: LayerSpec, gate: torch.Tensor) -> torch.Tensor:
        """Returns the sparse gates by which this rank's share of the down matrix is multiplied. The
        cutoff follows from the gates of all ranks."""
        if not self._ranks.share.splits_inputs:
            return sparse_gates(gate, spec.sparsity)
        num_inner = spec.inner or self._config.intermediate_size
        own = self._ranks.share.of(num_inner)
        whole = sparse_gates(self._ranks.gather(gate, num_inner), spec.sparsity)
        return whole[:, own.start : own.stop]

    def _experts(
        self,
        index: int,
        experts: Experts,
        weights: ExpertWeights,
        x: torch.Tensor,
        hidden: torch.Tensor,
        lora: StepLora,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns, for each row of x, the weighted sum of the outputs of the experts chosen for the
        row, plus the output of the shared MLP. Each expert multiplies all rows for which it was
        chosen at once. `hidden` is the residual stream, which router and experts with norms of
        their own read in place of x. `chosen` is [rows, top_k]: the experts, whatever the router's
        logits are. None: the router chooses."""
        if experts.has_own_norms:
            return self._experts_with_norms(index, experts, weights, x, hidden, lora)
        share = self._ranks.share
        width = self._config.hidden_size
        logits = self._project(x.to(weights.router.weight.dtype), (weights.router,))
        chosen, shares = choose(experts, logits, weights.correction, chosen)
        out = self._zeros_for_experts(weights, x)
        shared = None if weights.shared is None else self._mlp(index, weights.shared, x, lora)
        if shared is not None and weights.shared_gate is not None:
            # The bits of sigmoid depend on the place in a vector, so a row takes a whole one.
            gates = self._project(x, (weights.shared_gate,)).repeat(1, _VECTOR)
            shared = shared * torch.sigmoid(gates)[:, :1]
        if shared is not None and not share.splits_experts:
            out += shared
        self._add_chosen(index, experts, weights, x, chosen, shares, out)
        if not share.splits_experts:
            return whole_of(self._ranks, width, out.to(x.dtype))
        whole = self._ranks.sum(out.to(x.dtype))
        return whole if shared is None else whole + whole_of(self._ranks, width, shared)

    def _experts_with_norms(
        self,
        index: int,
        experts: Experts,
        weights: ExpertWeights,
        x: torch.Tensor,
        hidden: torch.Tensor,
        lora: StepLora,
    ) -> torch.Tensor:
        """Returns the same as `_experts` for experts with norms of their own (Gemma 4)."""
        assert weights.shared is not None
        assert weights.scales is not None
        logits = self._project(self._norm(hidden, weights.router_norm), (weights.router,))
        chosen, shares = choose(experts, logits, weights.correction)
        out = self._zeros_for_experts(weights, x)
        normed = self._norm(hidden, weights.input_norm)
        scaled = shares * weights.scales[chosen]
        self._add_chosen(index, experts, weights, normed, chosen, scaled, out)
        shared = self._mlp(index, weights.shared, x, lora)
        width = self._config.hidden_size
        shared = whole_of(self._ranks, width, shared)
        chosen_sum = out.to(x.dtype)
        if self._ranks.share.splits_experts:
            chosen_sum = self._ranks.sum(chosen_sum)
        else:
            chosen_sum = whole_of(self._ranks, width, chosen_sum)
        normed = self._norm(chosen_sum, weights.output_norm)
        return self._norm(shared, weights.shared_output_norm) + normed

    def _zeros_for_experts(self, weights: ExpertWeights, x: torch.Tensor) -> torch.Tensor:
        num_out = len(weights.mlps[0].down.weight)
        return torch.zeros(len(x), num_out, dtype=torch.float32, device=x.device)

    def _add_chosen(
        self,
        index: int,
        experts: Experts,
        weights: ExpertWeights,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Adds the outputs of the chosen experts to `out`, times their weights `shares`. `chosen`
        and `shares` are [rows, top_k]."""
        share = self._ranks.share
        first = share.of(experts.num).start if share.splits_experts else 0
        for expert, mlp in enumerate(weights.mlps, first):
            rows, places = torch.where(chosen == expert)
            if not len(rows):
                continue
            num_padding = -len(rows) % self._kernels.row_multiple
            padded = torch.nn.functional.pad(rows, (0, num_padding))
            own = shares[rows, places].unsqueeze(1)
            inputs = x[padded]
            if experts.weighs_inputs:
                inputs[: len(rows)] *= own.to(x.dtype)
            part = self._mlp(index, mlp, inputs, NO_LORA, is_whole=share.splits_experts)
            part = part[: len(rows)].float()
            out.index_add_(0, rows, part if experts.weighs_inputs else part * own)

    def _logits(self, x: torch.Tensor, rows: torch.Tensor, top_k: int) -> torch.Tensor:
        num_padding = -rows.shape[0] % self._kernels.row_multiple
        last = x[torch.nn.functional.pad(rows, (0, num_padding))]
        normed = self._norm_hidden(last, self._weights.final_norm)
        self.final_hidden = normed[: rows.shape[0]]
        output = Linear(self._weights.output, None, self._weights.output_blocks)
        own = self._project(normed, (output,))[: rows.shape[0]]
        if self._ranks is ALONE:
            return final_logits(self._config, own.float())
        # The bits of tanh depend on the element's place in a vector, so it is applied to all logits
        # at once. Equal logits after it may be different ones before.
        if top_k and self._config.logit_cap is None:
            logits = final_logits(self._config, own.float())
            return whole_logits(self._ranks, logits, self._config.vocab_size, top_k)
        logits = whole_logits(self._ranks, own, self._config.vocab_size)
        return final_logits(self._config, logits.float())

    def _added(
        self, x: torch.Tensor, delta: torch.Tensor, post_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the residual stream `x` plus `delta`, the output of attention or of the MLP."""
        delta = self._norm(delta, post_norm)
        if self._config.multipliers.residual != 1.0:
            delta = delta * self._config.multipliers.residual
        return x + delta

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Returns the rows of x after RMSNorm. Returns x itself if `weight` is None."""
        return x if weight is None else self._kernels.rms_norm(x, weight, self._config.rms_norm_eps)

    def _norm_hidden(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Returns the rows of the residual stream x after the model's norm, RMSNorm or LayerNorm.
        Returns x itself if `weight` is None."""
        if weight is None or not self._config.centers_norms:
            return self._norm(x, weight)
        wide = x.float()
        centered = wide - wide.mean(-1, keepdim=True)
        normed = self._kernels.rms_norm(centered, weight.float(), self._config.rms_norm_eps)
        return normed.to(x.dtype)

    def _norm_heads(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalizes heads [rows, heads, D]. The model's config says whether each head is
        normalized separately or all heads of a row together."""
        if self._config.qk_norm == "head":
            return self._norm(heads, weight)
        own = heads.flatten(1)
        normed = self._norm(gathered_heads(self._ranks, own, len(weight)), weight)
        return own_heads(self._ranks.share, normed, own.shape[1]).view(heads.shape)

    def _project(self, x: torch.Tensor, parts: tuple[Linear, ...]) -> torch.Tensor:
        """Multiplies x by several matrices, such as q, k and v. Returns the products side by side,
        [rows, outputs of all matrices]."""
        if len(parts) == 1 and parts[0].blocks is None:
            return self._kernels.linear(x, parts[0].weight, parts[0].bias)
        out = x.new_empty(x.shape[0], sum(part.weight.shape[0] for part in parts))
        first = 0
        for part in parts:
            for weight, bias in pieces(part):
                end = first + weight.shape[0]
                self._kernels.linear(x, weight, bias, out=out[:, first:end])
                first = end
        return out


def gathered_heads(ranks: Collectives, own: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the heads of all ranks, [rows, width]. `own` [rows, heads * D] has the heads of this
    rank. Several ranks may have the same head."""
    num_ranks = ranks.share.num_ranks
    together = ranks.gather(own, num_ranks * own.shape[1])
    num_copies = together.shape[1] // width
    return together.view(len(own), num_ranks, -1)[:, ::num_copies].flatten(1)


def own_heads(share: Share, heads: torch.Tensor, width: int) -> torch.Tensor:
    """Returns this rank's columns [rows, width] of the heads of all ranks."""
    num_copies = share.num_ranks * width // heads.shape[1]
    first = share.rank // num_copies * width
    return heads[:, first : first + width]


def _gate_clamped(clamp: GateClamp, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(-clamp.limit, clamp.limit)
    return (up + clamp.offset) * (gate * torch.sigmoid(gate * clamp.alpha))


def choose(
    experts: Experts,
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts for each row from the router's `logits`, unless `chosen` has them. Returns
    the numbers of the chosen experts and the weights of the experts' outputs, both
    [rows, top_k]."""
    has_own_scores = experts.has_sigmoids or experts.has_roots
    has_plain_scores = not (has_own_scores or experts.is_corrected or experts.groups)
    if has_plain_scores and experts.scale == 1.0:
        return choose_experts(logits, experts.top_k, experts.is_normalized)
    groups = experts.groups
    return choose_in_groups(
        logits,
        experts.top_k,
        is_normalized=experts.is_normalized,
        groups=(groups.num, groups.top) if groups else None,
        scale=experts.scale,
        has_sigmoids=experts.has_sigmoids,
        has_roots=experts.has_roots,
        correction=correction,
        chosen=chosen,
    )


def embedding_multiplier(config: ModelConfig, dtype: torch.dtype) -> float:
    """Returns the factor by which embeddings are multiplied. Like transformers, this function
    rounds the factor to the dtype of the embeddings."""
    return torch.tensor(config.multipliers.embedding, dtype=dtype).item()


def final_logits(config: ModelConfig, logits: torch.Tensor) -> torch.Tensor:
    """Multiplies the logits by a factor and caps them, in place, if the model's config says so.
    `logits` has the products with the output matrix, fp32."""
    if config.multipliers.logits != 1.0:
        logits *= config.multipliers.logits
    if config.logit_cap is not None:
        logits.div_(config.logit_cap).tanh_().mul_(config.logit_cap)
    return logits


def query_factors_of(rope: Rope, positions: torch.Tensor) -> torch.Tensor | None:
    """Returns the factors on the queries at these positions, fp32 [T]. Returns None if queries are
    not scaled by position."""
    if (scaling := rope.query_scaling) is None:
        return None
    return query_factors(
        positions, scale=scaling.scale, length=scaling.length, offset=scaling.offset
    )


def rope_tables(
    rope: Rope, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rotary frequency of each pair of elements in a head, and the factor by which cos
    and sin of this pair are multiplied. Both are [head_dim / 2].

    Pairs that are not rotated have frequency 0 and factor 1. They come after the rotated pairs.
    weights/load.py has reordered the rows of q and k to match this order (rotary_rows.py).
    """
    rotary_dim = 0 if rope.theta is None else rope.rotary_dim(head_dim)
    num_still = (head_dim - rotary_dim) // 2
    rotated = _rotary_frequencies(rope, rotary_dim)
    frequencies = torch.cat((rotated, torch.zeros(num_still)))
    factors = torch.full_like(rotated, rope.attention_factor)
    factors = torch.cat((factors, torch.ones(num_still)))
    return frequencies.to(device), factors.to(device)


def _rotary_frequencies(rope: Rope, rotary_dim: int) -> torch.Tensor:
    if rope.theta is None:
        return torch.zeros(0)
    scaling = rope.scaling
    if scaling is not None and scaling.kind == "alpha":
        grown = scaling.factor ** (rotary_dim / (rotary_dim - 2))
        return rotary_frequencies(rotary_dim, rope.theta * grown)
    frequencies = rotary_frequencies(rotary_dim, rope.theta)
    if scaling is not None and scaling.kind == "proportional":
        frequencies[int(scaling.proportion * rotary_dim // 2) :] = 0.0
        return frequencies / scaling.factor
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        factors = torch.tensor(scaling.long_factors if rope.is_long else scaling.short_factors)
        return scale_longrope(rotary_dim, rope.theta, factors)
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
        theta=rope.theta,
        factor=scaling.factor,
        original_len=scaling.original_max_position_embeddings,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        truncate=scaling.truncate,
    )
