"""The decoder of DeepSeek V4 (models/config/deepseek_v4.py).

    streams = copies of embedding[token]
    per layer:  x, mix = split(streams);  streams = mix(W_o attention(rotate(q), rotate(kv), kv))
                x, mix = split(streams);  streams = mix(experts(norm(x)))
    logits = W_out norm(collapse(streams))

where q = W_q norm(W_a norm(x)) and kv = norm(W_kv norm(x)). Values are rotated, because they are
the keys, so the output of attention is rotated back. Layers with a compressor attend to its entries
beside the KV of the window.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tandem.engine.executor.collectives import ALONE, Collectives, whole_of
from tandem.engine.executor.torch.compressors import StepCompressors
from tandem.engine.executor.torch.decoder import Decoder
from tandem.engine.executor.torch.inputs import StepInputs
from tandem.engine.executor.torch.lora import StepLora
from tandem.engine.executor.torch.streams import ResidualStreams
from tandem.engine.executor.weights.decoder_weights import ExpertWeights, LayerWeights, ModelWeights
from tandem.engine.executor.weights.expand import embedded
from tandem.models.config.model import ModelConfig
from tandem_kernels.dispatch import Angles, Kernels
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.rope import rotary_angles, rotate_last_pairs
from tandem_kernels.state_pool import Pool


class CompressedDecoder(Decoder):
    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: Kernels,
        ranks: Collectives = ALONE,
    ) -> None:
        super().__init__(config, weights, kernels, ranks)
        assert config.streams is not None
        self._streams = ResidualStreams(config.streams, kernels, config.rms_norm_eps)

    def forward(
        self,
        inputs: StepInputs,
        pools: Sequence[Pool],
        lora: StepLora,
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Computes a step as `Decoder.forward` does."""
        specs = self._config.layers
        places = [place for place in self._places if place is not None]
        group = places[0].group
        pool = pools[group]
        assert isinstance(pool, KvPool)
        spans = [replace(span, counted_len=span.context_len) for span in inputs.spans[group]]
        attend = self._attention(spans, pool, specs[0].window, is_chunked=False)
        tables = [self._frequencies[spec.rope, self._rope_dim(spec)] for spec in specs]
        all_angles = {
            rope: rotary_angles(inputs.positions, *self._frequencies[rope, dim])
            for rope, dim in self._frequencies
        }
        compressors = StepCompressors(
            self._config, self._kernels, self._project, attend.groups, pools, inputs, tables
        )
        x = embedded(self._weights, inputs.token_ids)
        if x.shape[1] < self._config.hidden_size:
            x = self._ranks.gather(x, self._config.hidden_size)
        assert self._config.streams is not None
        streams = x.unsqueeze(1).repeat(1, self._config.streams.num, 1)
        for index, (spec, layer) in enumerate(zip(specs, self._weights.layers, strict=True)):
            assert layer.streams is not None
            x, mixture = self._streams.split(layer.streams.attention, streams)
            normed = self._norm(x, layer.attention_norm)
            angles = all_angles[spec.rope]
            latents, queries, kv = self._shared_heads(layer, normed, angles)
            kv = kv[: inputs.num_tokens]
            pool.write(places[index].number, inputs.token_rows[group], kv, kv)
            if layer.compressor is not None:
                compressors.write(index, layer.compressor, normed)
            tell_written = on_kv_written if index + 1 == len(specs) else None
            if tell_written is not None and self._ranks is ALONE:
                tell_written()
            entries = None
            if layer.compressor is not None:
                entries = compressors.entries(index, layer.compressor, normed, latents, angles)
            attended = attend(places[index].number, queries, layer.sinks, None, entries)
            streams = self._streams.add(mixture, streams, self._attended(layer, attended, angles))
            if tell_written is not None and self._ranks is not ALONE:
                tell_written()
            x, mixture = self._streams.split(layer.streams.mlp, streams)
            normed = self._norm(x, layer.mlp_norm)
            assert isinstance(layer.mlp, ExpertWeights)
            assert spec.experts is not None
            table = layer.mlp.table
            chosen = None if table is None else table[inputs.token_ids]
            delta = self._experts(index, spec.experts, layer.mlp, normed, x, lora, chosen)
            streams = self._streams.add(mixture, streams, delta)
        assert self._weights.head_streams is not None
        x = self._streams.collapse(self._weights.head_streams, streams)
        return self._logits(x, inputs.logit_rows, inputs.top_k)

    def _shared_heads(
        self, layer: LayerWeights, x: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the latents of queries [rows, q rank], the queries [rows, heads, D], and the keys
        [rows, 1, D], which are the values, too."""
        weights = layer.shared_kv
        assert weights is not None
        dim = self._config.head_dim
        projected = self._project(x, layer.qkv)
        latents = self._norm(projected[:, :-dim], weights.q_norm)
        queries = self._project(latents, (weights.q_out,)).view(len(x), -1, dim)
        queries = self._norm(queries, queries.new_ones(dim))
        kv = self._norm(projected[:, -dim:], weights.kv_norm).unsqueeze(1)
        return latents, rotate_last_pairs(queries, angles), rotate_last_pairs(kv, angles)

    def _attended(
        self, layer: LayerWeights, attended: torch.Tensor, angles: Angles
    ) -> torch.Tensor:
        """Returns the output of attention [rows, hidden], from that of this rank's heads
        [rows, heads, D]."""
        assert layer.shared_kv is not None
        assert layer.attention_out is not None
        cos, sin = angles
        turned = rotate_last_pairs(attended, (cos, -sin))
        grouped = turned.view(len(turned), len(layer.shared_kv.out_groups), -1)
        narrow = self._kernels.linear_of_heads(grouped, layer.shared_kv.out_groups)
        share = self._project(self._inputs_of_all(narrow.flatten(1)), (layer.attention_out,))
        return whole_of(self._ranks, self._config.hidden_size, share)
