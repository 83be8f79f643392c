"""The decoder of torch/decoder.py, computed by C++ kernels on the CPU
(kernels/tandem_kernels/native).

Number formats:

    weights        as in the checkpoint (bf16, fp32 or quantized), or int8 with a scale per output
    activations    fp32
    sums           fp32

Activations are rounded before some products: to bf16 if the weights are bf16 and the processor
multiplies bf16 directly, and to int8 if the weights are quantized.

The terms of a sum are always added in the same order, no matter which other sequences are in the
step. So the tokens of a sequence do not depend on other sequences. Therefore this decoder is used
for both values of the setting `numerics`: "fast" and "invariant".
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from ctypes import Array, addressof, c_int64, c_void_p, pointer
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tandem.common.dtypes import DTYPE_BYTES
from tandem.engine.cache.heavy_hitters import Sums
from tandem.engine.cache.layout.kv_groups import (
    LayerPlace,
    entry_places,
    input_places,
    layer_places,
    state_places,
)
from tandem.engine.cache.layout.pool_memory import own_pages
from tandem.engine.executor.native.lora import (
    NativeAdapters,
    PackedLora,
    by_adapter,
    rows_by_adapter,
)
from tandem.engine.executor.native.packing import KINDS, Packer
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.torch.alt_up import gate_deviations
from tandem.engine.executor.torch.decoder import (
    embedding_multiplier,
    query_factors_of,
    rope_tables,
)
from tandem.engine.executor.weights.decoder_weights import (
    CompressorWeights,
    ExpertWeights,
    LayerInputWeights,
    LayerWeights,
    Linear,
    ModelWeights,
    StateWeights,
)
from tandem.engine.executor.weights.decoder_weights import Mlp as MlpWeights
from tandem.engine.executor.weights.expand import whole
from tandem.engine.executor.weights.lora import LoraWeights
from tandem.engine.executor.weights.share import WHOLE, Share
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.config.compressor import Compressor
from tandem.models.config.experts import Experts as ExpertSpec
from tandem.models.config.layers import LayerSpec
from tandem.models.config.linear_attention import (
    GatedDelta,
    KimiDelta,
    LinearAttention,
    Mamba2,
)
from tandem.models.config.model import ModelConfig
from tandem.models.config.rope import Rope
from tandem_kernels.kv_cache import KvPool, StaticKv
from tandem_kernels.kv_fp8 import FixedScales
from tandem_kernels.logprobs import Logprobs
from tandem_kernels.native.library import (
    COPIES_MAX,
    PANEL,
    SECTIONS_MAX,
    Activation,
    AltUp,
    AltUpLayer,
    Experts,
    Gating,
    Indexer,
    Kind,
    KvGroup,
    Layer,
    LayerInput,
    LayerInputs,
    LayerStreams,
    Library,
    Mlp,
    Model,
    Stage,
    StateForm,
    StateLayer,
    Step,
    Streams,
    load,
)
from tandem_kernels.native.state import TAPS_MAX
from tandem_kernels.rope import rotary_angles
from tandem_kernels.row_pool import RowPool
from tandem_kernels.sampling import Draw, sample
from tandem_kernels.state_pool import Pool, StatePool

_HEAD_MAX = 512  # the largest head size that kv_int4.h supports
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu2": Activation.RELU_SQUARED,
}
# The fields num_first and num_last of a Span (decoder.h) for a sequence without a KV budget.
# num_last = 0 means that a query attends to all keys.
_ALL_KEYS = (0, 0)
_INT32_BYTES = 4
_INPUTS = ("token_ids", "positions", "spans", "logit_rows")
_KV_KINDS = {
    "float32": Kind.F32,
    "bfloat16": Kind.BF16,
    "int8": Kind.I8,
    "fp8_e4m3": Kind.F8,
    "k8v4": Kind.I8_I4,
    "int4": Kind.I4,
}
# The kinds of int8 KV rows for latent attention, by the dtype of the rotated keys.
_LATENT_KV_KINDS = {"float32": Kind.I8_F32, "bfloat16": Kind.I8_BF16}
_ANGLES_MIN = 2048  # number of positions in a new `_AngleTable`


def why_not_native(config: ModelConfig) -> str:
    """Returns why the native kernels cannot compute a model, or an empty string if they can."""
    if config.alt_up is not None and config.alt_up.num > COPIES_MAX:
        return f"the residual stream has {config.alt_up.num} copies, more than {COPIES_MAX}"
    if config.streams is not None and config.streams.num > COPIES_MAX:
        return f"there are {config.streams.num} residual streams, more than {COPIES_MAX}"
    for layer in config.layers:
        if layer.compressor is not None and max(layer.compressor.dims) > _HEAD_MAX:
            return f"entries have {max(layer.compressor.dims)} elements, more than {_HEAD_MAX}"
        head_dim = config.heads_of(layer).dim
        if head_dim > _HEAD_MAX and config.latent is None:
            return f"the head size {head_dim} is larger than {_HEAD_MAX}"
        if head_dim % PANEL:
            return f"the head size {head_dim} is not a multiple of {PANEL}"
        if (linear := layer.linear) is None:
            continue
        if linear.value_dim % PANEL:
            return f"the head size {linear.value_dim} of states is not a multiple of {PANEL}"
        if linear.kernel > TAPS_MAX:
            return f"the kernel {linear.kernel} of convolutions is larger than {TAPS_MAX}"
    if config.value_dim is not None and config.value_dim % PANEL:
        return f"the size of values {config.value_dim} is not a multiple of {PANEL}"
    return ""


class NativeDecoder:
    """Computes steps with the C++ kernels. One thread at a time may call `forward`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        num_threads: int,
        int8: bool = False,
        instructions: str | None = None,
        memory: RankMemory | None = None,
    ) -> None:
        """Packs the weights into the order in which the kernels read them. The decoder keeps the
        packed copies. Of the tensors in `weights`, it keeps at most the embedding.

        With `memory`, this decoder is one rank of a tensor-parallel engine: it keeps its share of
        the packed weights, and computes each step together with the other ranks.
        """
        library = load()
        assert library is not None
        self._library: Library = library
        self._config = config
        self._instructions = instructions
        self._draw_rows = partial(library.draw, num_threads=num_threads, instructions=instructions)
        self._memory = memory
        share = WHOLE if memory is None else Share(memory.rank, memory.num_ranks)
        self._packer = Packer(
            library, weights.pages, share=share, int8=int8, instructions=instructions
        )
        self._angles = _AngleTable(config)
        room = None if memory is None else memory.logits()
        self._results = _Results(0, config.vocab_size, room)
        # Item i is the index of the token in the last step from which row i of the logits was
        # computed.
        self._logit_rows: list[int] = []
        self._pools: Sequence[Pool] | None = None
        of_states = state_places(config)
        self._entry_places, self._input_places = entry_places(config), input_places(config)
        self._state_groups = {place.group for place in of_states if place is not None}
        self.adapters = NativeAdapters()
        self._indexers: list[Indexer] = []
        layers = (Layer * config.num_layers)(
            *map(
                self._layer,
                range(config.num_layers),
                config.layers,
                layer_places(config),
                of_states,
                weights.layers,
            )
        )
        output = self._packer.matrix((Linear(weights.output, None, weights.output_blocks),))
        self._kept = [layers, self._packer]  # referenced here because C++ has pointers to them
        self._model = Model(
            layers=layers,
            final_norm=self._packer.floats(weights.final_norm),
            **self._packer.embedding(weights, output),
            computed_kind=KINDS[weights.embedding.dtype],
            output=output,
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            inner=max(config.intermediate_size, *map(_inner, config.layers)),
            vocab=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            num_threads=num_threads,
            norms_all_heads=config.qk_norm == "all",
            norms_rotated=config.norms_rotated_heads,
            centers_norms=config.centers_norms,
            is_parallel=config.is_parallel,
            norms_values=config.has_value_norms,
            attention_scale=config.attention_scale,
            embedding_multiplier=embedding_multiplier(config, weights.embedding.dtype),
            residual_multiplier=config.multipliers.residual,
            logits_multiplier=config.multipliers.logits,
            logit_cap=config.logit_cap or 0.0,
            attention_cap=config.attention_cap or 0.0,
            value_scale=config.value_scale,
            layer_inputs=self._layer_inputs(weights),
            alt_up=self._alt_up(weights),
            streams=self._streams(weights),
        )
        shared = None if memory is None else memory.share
        self._decoder = library.create(self._model, instructions, shared)
        self.instructions = library.instructions(instructions)

    @property
    def multiplies_bf16(self) -> bool:
        """True: the kernels multiply bfloat16 numbers directly. False: the kernels convert bfloat16
        weights to fp32 first."""
        return self._library.packed_kind(Kind.BF16, self._instructions) is Kind.BF16_PAIRS

    def __del__(self) -> None:
        if decoder := getattr(self, "_decoder", 0):
            self._library.destroy(decoder)

    def forward(
        self,
        batch: StepBatch,
        pools: Sequence[Pool],
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Computes a step. Writes the tokens' KV into `pools`, one pool for each KV group. Returns
        fp32 logits [rows that need logits, vocab], which are valid until the next call.

        `on_kv_written` is called when all KV is in the pools, before the logits are computed.
        """
        slices = by_adapter(batch.slices) if batch.has_adapters else batch.slices
        inputs = _Inputs(slices, batch.slices, pools[0].layout.block_size, self._state_groups)
        if self._memory is not None:
            self._memory.post(inputs.sent, inputs.numbers)
        step = self._step(inputs.sent, inputs.numbers.buffer_info()[0], pools)
        step.block_sums = inputs.block_sums.address()
        step.embeddings = inputs.embeddings_address
        self._library.to_last_kv(self._decoder, step)
        if on_kv_written is not None:
            on_kv_written()
        self._library.to_logits(self._decoder, step)
        inputs.block_sums.write_back()
        self._logit_rows = inputs.logit_rows
        return self._results.logits

    def compute_share(self, sent: SentStep, numbers_address: int, pools: Sequence[Pool]) -> None:
        """Computes this rank's share of a step of rank 0, which has sent the step's inputs."""
        step = self._step(sent, numbers_address, pools)
        self._library.to_last_kv(self._decoder, step)
        self._library.to_logits(self._decoder, step)

    def _step(self, sent: SentStep, numbers_address: int, pools: Sequence[Pool]) -> Step:
        # Reading a tensor's address is slow. The pools are normally the same in every step, so the
        # addresses of their tensors are read only once.
        if self._pools is not pools:
            self._groups = _kv_groups_of(pools)
            self._kept_offsets = [_part_offsets(pool) for pool in pools]
            for group, offsets in zip(self._groups, self._kept_offsets, strict=True):
                group.parts = None if offsets is None else addressof(offsets)
            self._pools = pools
        at = [numbers_address + first * _INT32_BYTES for first in sent.firsts]
        num_inputs = len(_INPUTS)
        for number, group in enumerate(self._groups):
            group.slots, group.block_tables = at[num_inputs + 2 * number :][:2]
        self._angles.reach(sent.positions_end)
        results = self._results = self._results.of(sent.num_logit_rows)
        return Step(
            **dict(zip(_INPUTS, at, strict=False)),
            **self._angles.fields,
            groups=addressof(self._groups),
            block_size=pools[0].layout.block_size,
            kv_kind=_kv_kind_of(pools),
            **self.adapters.fields(sent.rows_by_adapter),
            logits=results.logits_address,
            most_likely=results.most_likely.buffer_info()[0],
            # Only rank 0 adds to the sums. The others need to know whether there are any.
            block_sums=numbers_address if sent.has_block_sums else None,
            num_rows=sent.num_rows,
            num_spans=sent.num_spans,
            num_logit_rows=sent.num_logit_rows,
        )

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> list[int]:
        """Samples one token for each row of the last step's logits and returns the token ids. If
        `rows` is given, samples only for these rows."""
        most_likely = self._results.most_likely.tolist()
        if rows is not None:
            logits = logits[rows]
            most_likely = [most_likely[row] for row in rows]
        return sample(logits, draws, most_likely, self._draw_rows)

    def logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: int
    ) -> Logprobs:
        """Returns log probabilities computed from rows of the last step's logits. For the row
        `rows[i]`, the result has the log probability of the token `token_ids[i]` and of the
        `num_top` most likely tokens."""
        num_top = min(num_top, self._config.vocab_size)
        return self._library.measure(
            self._decoder,
            logits.data_ptr(),
            np.array(rows, np.int32),
            np.array(token_ids, np.int32),
            num_top,
        )

    def final_hidden(self, rows: Sequence[int]) -> list[list[float]]:
        """Returns a hidden state for each of the given rows of the last step's logits: the output
        of the final norm from which the row was computed, [hidden]."""
        of_step = np.array([self._logit_rows[row] for row in rows], np.int32)
        size = self._config.hidden_size
        states = self._library.final_hidden(self._decoder, of_step, size)
        return [state.tolist() for state in states]

    def pack_adapter(self, weights: LoraWeights) -> PackedLora:
        """Packs an adapter for `adapters.add`. May run in any thread."""
        return PackedLora(self._library, weights, self._config.num_qkv)

    def take_stages(self) -> dict[Stage, float]:
        """Returns the seconds spent in each stage of a step since the last call of this method."""
        return self._library.take_stages(self._decoder)

    def _layer(
        self,
        number: int,
        spec: LayerSpec,
        place: LayerPlace | None,
        state_place: LayerPlace | None,
        weights: LayerWeights,
    ) -> Layer:
        gate = weights.attention_gate
        heads = self._config.heads_of(spec)
        layer = Layer(
            attention_norm=self._packer.floats(weights.attention_norm),
            attention_post_norm=self._packer.floats(weights.attention_post_norm),
            q_norm=self._packer.floats(weights.q_norm),
            k_norm=self._packer.floats(weights.k_norm),
            sinks=self._packer.floats(weights.sinks),
            mlp_norm=self._packer.floats(weights.mlp_norm),
            mlp_post_norm=self._packer.floats(weights.mlp_post_norm),
            projected_factors=self._packer.floats(weights.projected_factors),
            num_gates=0 if gate is None else len(gate.weight),
            rope=self._angles.number_of(spec),
            window=-(spec.window or 0) if spec.is_chunked else spec.window or 0,
            has_attention=place is not None,
            num_kv_heads=heads.num_kv,
            head_dim=heads.dim,
            value_dim=self._config.value_dim or heads.dim,
            shares_kv=spec.kv_source is not None,
            scalar=1.0 if weights.scalar is None else weights.scalar.item(),
            has_mlp=weights.mlp is not None,
            shares_choice=spec.shares_choice,
            has_sparse_gates=spec.sparsity > 0,
            gate_deviations=gate_deviations(spec.sparsity),
        )
        if weights.attention_out is not None:
            layer.qkv = self._packer.matrix(weights.qkv if gate is None else (*weights.qkv, gate))
            layer.attention_out = self._packer.matrix((weights.attention_out,))
        if place is not None:
            layer.group, layer.place = place
        if weights.layer_inputs is not None:
            layer.input = pointer(self._layer_input(weights.layer_inputs))
        if state_place is not None:
            assert spec.linear is not None
            assert weights.state is not None
            layer.state = pointer(self._state(spec.linear, state_place, weights.state))
        if weights.latent is not None:
            assert self._config.latent is not None
            layer.latent = pointer(self._packer.latent(self._config.latent, weights.latent))
        if weights.shared_kv is not None:
            assert self._config.shared_kv is not None
            layer.shared_kv = pointer(
                self._packer.shared_kv(self._config.shared_kv, weights.shared_kv)
            )
        if spec.compressor is not None:
            assert weights.compressor is not None
            self._add_compressor(layer, number, spec.compressor, weights.compressor)
        if weights.streams is not None:
            streams = LayerStreams(
                self._packer.mixture(weights.streams.attention),
                self._packer.mixture(weights.streams.mlp),
            )
            self._packer.keep(streams)
            layer.streams = pointer(streams)
        if spec.indexer is not None:
            assert weights.indexer is not None
            indexer = self._packer.indexer(
                spec.indexer,
                weights.indexer,
                place=len(self._indexers),
                norm_eps=self._config.rms_norm_eps,
            )
            self._indexers.append(indexer)
        if spec.indexer is not None or spec.shares_choice:
            layer.indexer = pointer(self._indexers[-1])
        if weights.alt_up is not None:
            layer.alt_up = pointer(self._alt_up_layer(weights))
        if isinstance(weights.mlp, ExpertWeights):
            assert spec.experts is not None
            layer.experts = pointer(self._experts(spec.experts, weights.mlp, weights.mlp_norm))
            if weights.mlp.shared is not None:
                layer.mlp = self._mlp(weights.mlp.shared)
        elif weights.mlp is not None:
            layer.mlp = self._mlp(weights.mlp, has_sparse_gates=spec.sparsity > 0)
        return layer

    def _add_compressor(
        self, layer: Layer, number: int, sizes: Compressor, weights: CompressorWeights
    ) -> None:
        """Adds a compressor, and the indexer that chooses its entries, to the layer `number`."""
        entries, inputs = self._entry_places[number], self._input_places[number]
        assert entries is not None
        assert inputs is not None
        compressor = self._packer.compressor(sizes, weights, entries=entries, inputs=inputs)
        layer.compressor = pointer(compressor)
        if sizes.indexer is not None:
            layer.indexer = pointer(self._packer.entry_indexer(sizes.indexer, weights, sizes.rate))

    def _streams(self, weights: ModelWeights) -> Any:
        """Returns a pointer to the residual streams; None if there is one."""
        if (sizes := self._config.streams) is None or weights.head_streams is None:
            return None
        streams = Streams(
            head=self._packer.mixture(weights.head_streams),
            num=sizes.num,
            num_iterations=sizes.num_iterations,
            eps=sizes.eps,
        )
        self._packer.keep(streams)
        return pointer(streams)

    def _layer_inputs(self, weights: ModelWeights) -> Any:
        """Returns a pointer to the embeddings that tokens have for each layer; None if they have
        none."""
        sizes, per_layer = self._config.per_layer_inputs, weights.per_layer
        if sizes is None or per_layer is None:
            return None
        embedding = per_layer.embedding.contiguous()
        self._packer.keep(embedding)
        inputs = LayerInputs(
            embedding=embedding.data_ptr(),
            projection=self._packer.matrix((per_layer.projection,)),
            norm=self._packer.floats(per_layer.norm),
            embedding_kind=KINDS[embedding.dtype],
            size=sizes.size,
            vocab=sizes.vocab_size,
            # rounded to the dtype of the embeddings, as in transformers
            multiplier=torch.tensor(sizes.size**0.5, dtype=embedding.dtype).item(),
        )
        self._packer.keep(inputs)
        return pointer(inputs)

    def _alt_up(self, weights: ModelWeights) -> Any:
        """Returns a pointer to the copies of the residual stream; None if there are none."""
        if (sizes := self._config.alt_up) is None or weights.copies is None:
            return None
        alt_up = AltUp(
            make=self._packer.matrices(weights.copies.make),
            merge=self._packer.matrices(weights.copies.merge),
            num=sizes.num,
            active=sizes.active,
        )
        self._packer.keep(alt_up)
        return pointer(alt_up)

    def _alt_up_layer(self, weights: LayerWeights) -> AltUpLayer:
        sizes, own, laurel = self._config.alt_up, weights.alt_up, weights.laurel
        assert sizes is not None
        assert own is not None
        assert laurel is not None
        router = whole(own.router) * own.router_norm.float() / self._config.hidden_size
        layer = AltUpLayer(
            router=self._packer.floats(router),
            prediction=self._packer.floats(whole(own.prediction)),
            correction=self._packer.floats(whole(own.correction)),
            output_scale=self._packer.floats(own.output_scale if sizes.scales_output else None),
            left=self._packer.matrix((laurel.left,)),
            right=self._packer.matrix((laurel.right,)),
            laurel_norm=self._packer.floats(laurel.norm),
        )
        self._packer.keep(layer)
        return layer

    def _layer_input(self, weights: LayerInputWeights) -> LayerInput:
        gate = self._packer.matrix((weights.gate,))
        gate.gating = _gating(self._config)
        layer_input = LayerInput(
            gate=gate,
            projection=self._packer.matrix((weights.projection,)),
            norm=self._packer.floats(weights.norm),
        )
        self._packer.keep(layer_input)
        return layer_input

    def _state(
        self, sizes: LinearAttention, place: LayerPlace, weights: StateWeights
    ) -> StateLayer:
        def of_sections(channels: torch.Tensor | None) -> Array[c_void_p]:
            parts = () if channels is None else torch.split(channels, sizes.sections)
            return (c_void_p * SECTIONS_MAX)(
                *(self._packer.floats(part.t().contiguous()) for part in parts)
            )

        norm = torch.ones(sizes.num_outputs) if weights.norm is None else weights.norm.float()
        if isinstance(sizes, GatedDelta | KimiDelta):
            norm = norm.repeat(sizes.num_heads)
        layer = StateLayer(
            taps=of_sections(weights.conv),
            conv_bias=of_sections(weights.conv_bias),
            a_log=self._packer.floats(weights.a_log),
            dt_bias=self._packer.floats(weights.dt_bias),
            skip=self._packer.floats(weights.skip),
            norm=self._packer.floats(norm * weights.output_factor),
            form=_form(sizes),
            has_norm=weights.norm is not None,
            num_k_heads=sizes.num_k_heads,
            num_v_heads=sizes.num_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.num_outputs // sizes.num_heads,
            num_taps=sizes.kernel,
            group=place.group,
            place=place.number,
            rate_max=sizes.rate_max if isinstance(sizes, GatedDelta) else 1.0,
            norm_eps=self._norm_eps_of(sizes),
        )
        if weights.decay_out is not None and weights.gate_out is not None:
            layer.decay_out = self._packer.matrix((weights.decay_out,))
            layer.gate_out = self._packer.matrix((weights.gate_out,))
        self._packer.keep(layer)
        return layer

    def _norm_eps_of(self, sizes: LinearAttention) -> float:
        own = sizes.norm_eps if isinstance(sizes, GatedDelta) else None
        return self._config.rms_norm_eps if own is None else own

    def _experts(
        self, spec: ExpertSpec, weights: ExpertWeights, norm: torch.Tensor | None
    ) -> Experts:
        """`norm` is the norm before the experts."""
        gate = None
        if weights.shared_gate is not None:
            assert norm is not None
            gate = weights.shared_gate.weight.float().flatten() * norm.float()
        experts = Experts(
            mlps=(Mlp * spec.num)(*map(self._mlp, weights.mlps)),
            router=self._packer.matrix((weights.router,), keeps_kind=True),
            correction=self._packer.floats(weights.correction),
            num=spec.num,
            top_k=spec.top_k,
            is_normalized=spec.is_normalized,
            has_sigmoids=spec.has_sigmoids,
            has_roots=spec.has_roots,
            weighs_inputs=spec.weighs_inputs,
            num_groups=spec.groups.num if spec.groups else 0,
            top_groups=spec.groups.top if spec.groups else 0,
            scale=spec.scale,
            shared_gate=self._packer.floats(gate),
            router_norm=self._packer.floats(weights.router_norm),
            input_norm=self._packer.floats(weights.input_norm),
            output_norm=self._packer.floats(weights.output_norm),
            shared_output_norm=self._packer.floats(weights.shared_output_norm),
            scales=self._packer.floats(weights.scales),
        )
        if weights.table is not None:
            table = weights.table.to(torch.int32, copy=True).contiguous()
            experts.table = table.data_ptr()
            self._packer.keep(table)
        self._packer.keep(experts)
        return experts

    def _mlp(self, weights: MlpWeights, *, has_sparse_gates: bool = False) -> Mlp:
        # The cutoff of sparse gates follows from all gates of a row, so these come one after the
        # other.
        is_fused = self._config.has_gates and not has_sparse_gates
        pack = self._packer.gate_up if is_fused else self._packer.matrix
        gate_up = pack(weights.gate_up)
        gate_up.gating = _gating(self._config)
        return Mlp(gate_up=gate_up, down=self._packer.matrix((weights.down,)))


def _form(sizes: LinearAttention) -> StateForm:
    if isinstance(sizes, GatedDelta):
        return StateForm.GATED_DELTA
    if isinstance(sizes, KimiDelta):
        return StateForm.KIMI_DELTA
    return StateForm.MAMBA2 if isinstance(sizes, Mamba2) else StateForm.SHORT_CONV


def _inner(spec: LayerSpec) -> int:
    """Returns the size of a layer's own or shared MLP; 0 if it is the model's."""
    return spec.experts.shared_inner if spec.experts else spec.inner or 0


def _gating(config: ModelConfig) -> Gating:
    if clamp := config.gate_clamp:
        return Gating(Activation.CLAMPED, clamp.alpha, clamp.limit, clamp.offset)
    if factors := config.layer_factors:
        return Gating(Activation.SILU, factors.gate, factors.down)
    return Gating(_ACTIVATIONS[config.activation], 1.0, 1.0)


class SentStep(NamedTuple):
    """The inputs of a step, except an array of int32 numbers that has all of the step's arrays."""

    firsts: tuple[int, ...]  # index in the array of the first number of each input
    num_rows: int
    num_spans: int
    num_logit_rows: int
    positions_end: int  # all positions are less
    has_block_sums: bool
    rows_by_adapter: dict[str, int]  # number of rows of each adapter, in their order


class _Inputs:
    """The inputs of a step as int32 arrays for the C++ kernels. The step's tokens are numbered
    sequence after sequence, and the number of a token is called its row.

    All arrays are in one buffer that is filled from Python lists. For a step with one token, this
    is the fastest way. Such a step is short, so the time to prepare its inputs matters.
    """

    def __init__(
        self,
        slices: Sequence[SequenceSlice],
        wanted: Sequence[SequenceSlice],
        block_size: int,
        state_groups: Container[int] = (),
    ) -> None:
        """`slices` has the slices in the order in which their tokens are numbered. `wanted` has the
        same slices in the order in which the caller expects the rows of logits. The tables of
        `state_groups` have one entry, the slot of the sequence's running state."""
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[int] = []
        slots: list[int] = []
        tables: list[int] = []
        rows: dict[int, range] = {}
        self.block_sums = _BlockSums()
        given: list[torch.Tensor] = []
        num_given = 0
        for piece in slices:
            table = piece.block_table
            num_tokens = piece.num_tokens
            context_len = piece.context_len
            places = range(context_len - num_tokens, context_len)
            visible = piece.visible or _ALL_KEYS
            sums = self.block_sums.add(piece.block_sums)
            spans += (len(token_ids), num_tokens, context_len, len(tables), *visible, sums)
            token_ids += piece.token_ids
            for at, embeddings in piece.given:
                row = len(token_ids) - num_tokens + at
                num = len(embeddings)
                token_ids[row : row + num] = range(-1 - num_given, -1 - num_given - num, -1)
                given.append(embeddings)
                num_given += num
            positions += [at + piece.num_evicted for at in places] if piece.num_evicted else places
            slots += [table[at // block_size] * block_size + at % block_size for at in places]
            tables += table[: -(-context_len // block_size)]
            rows[id(piece)] = range(len(token_ids) - piece.num_logits, len(token_ids))
        # Kept here, because the kernels read it by its address.
        self._embeddings = torch.cat(given).float().contiguous() if given else None
        groups = [(slots, tables), *_other_groups(slices, block_size, state_groups)]
        self.logit_rows = list(chain.from_iterable([rows[id(piece)] for piece in wanted]))
        self.numbers = array("i")  # int32; a number that does not fit raises OverflowError
        firsts = []
        for part in (token_ids, positions, spans, self.logit_rows, *chain.from_iterable(groups)):
            firsts.append(len(self.numbers))
            self.numbers.extend(part)
        self.sent = SentStep(
            firsts=tuple(firsts),
            num_rows=len(token_ids),
            num_spans=len(slices),
            num_logit_rows=len(self.logit_rows),
            positions_end=max(piece.context_len + piece.num_evicted for piece in slices),
            has_block_sums=self.block_sums.has_any,
            rows_by_adapter=rows_by_adapter(slices),
        )

    @property
    def embeddings_address(self) -> int | None:
        """Address of the embeddings for which negative token ids stand; None if there are none."""
        return None if self._embeddings is None else self._embeddings.data_ptr()


def _other_groups(
    slices: Sequence[SequenceSlice], block_size: int, state_groups: Container[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields, for each KV group except the first, the slots of the step's tokens and the block
    tables of all slices, one after the other."""
    for number in range(len(slices[0].other_tables)):
        slots: list[int] = []
        tables: list[int] = []
        if number + 1 in state_groups:
            yield slots, [piece.other_tables[number][0] for piece in slices]
            continue
        for piece in slices:
            table = piece.other_tables[number]
            places = range(piece.context_len - piece.num_tokens, piece.context_len)
            slots += [table[at // block_size] * block_size + at % block_size for at in places]
            tables += table[: -(-piece.context_len // block_size)]
        yield slots, tables


class _AngleTable:
    """The cosines and sines of RoPE for the positions 0 to 2,047. If a step has a higher position,
    the number of positions grows to the next power of two, such as 4,096.

    Looking up a cosine is faster than computing it in each step. The table also makes the cosines
    independent of the batch: when torch computes several positions at once, the last bits of a
    cosine may depend on the number of positions.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        # Each rope, with the number of elements of a head that it may rotate.
        self._ropes = list(dict.fromkeys(map(self._rope_of, config.layers)))
        cpu = torch.device("cpu")
        self._tables = [rope_tables(rope, dim, cpu) for rope, dim in self._ropes]
        self._size = 0
        self.reach(_ANGLES_MIN)

    def number_of(self, layer: LayerSpec) -> int:
        """Returns the number of a layer's table."""
        return self._ropes.index(self._rope_of(layer))

    def _rope_of(self, layer: LayerSpec) -> tuple[Rope, int]:
        return layer.rope, self._config.rope_dim if layer.heads is None else layer.heads.dim

    def reach(self, positions_end: int) -> None:
        """Extends the tables to all positions less than `positions_end`.

        Sets `fields` to the addresses of the tables, each fp32 [ropes, positions, rope_dim / 2],
        and, if a layer scales queries by position, of their factors, fp32 [ropes, positions]. A
        table with fewer elements than the largest one is padded at its end.
        """
        if positions_end <= self._size:
            return
        self._size = 1 << (positions_end - 1).bit_length()
        positions = torch.arange(self._size)
        angles = [rotary_angles(positions, *tables) for tables in self._tables]
        self._cosines, self._sines = (
            pad_sequence([table.flatten() for table in tables], batch_first=True)
            for tables in zip(*angles, strict=True)
        )
        self.fields = {
            "cosines": self._cosines.data_ptr(),
            "sines": self._sines.data_ptr(),
            "table_floats": self._cosines[0].numel(),
            "table_positions": self._size,
        }
        factors = [query_factors_of(rope, positions) for rope, _ in self._ropes]
        if any(each is not None for each in factors):
            ones = torch.ones(self._size)
            self._factors = torch.stack([ones if each is None else each for each in factors])
            self.fields["query_factors"] = self._factors.data_ptr()


class _BlockSums:
    """Joins the block sums of a step's sequences in one array for the C++ kernels.

    A sequence has block sums only if its KV budget keeps heavy hitters, which are the blocks that
    get the most attention. The sum of a block is the total softmax weight that queries gave to the
    block's keys.
    """

    def __init__(self) -> None:
        self._of_sequences: list[Sums] = []
        self._all: Sums | None = None
        self._size = 0

    def add(self, sums: Sums | None) -> int:
        """Appends the block sums of a sequence. Returns the index of the first of these sums in the
        joined array, or -1 if `sums` is None."""
        if sums is None:
            return -1
        first = self._size
        self._size += len(sums)
        self._of_sequences.append(sums)
        return first

    @property
    def has_any(self) -> bool:
        return bool(self._of_sequences)

    def address(self) -> int | None:
        """Returns the address of the joined array, or None if no sequence has block sums."""
        if not self._of_sequences:
            return None
        self._all = np.concatenate(self._of_sequences)
        return self._all.ctypes.data

    def write_back(self) -> None:
        """Copies the sums, which the kernels have updated, from the joined array to the arrays that
        were passed to `add`."""
        if self._all is not None:
            first = 0
            for sums in self._of_sequences:
                sums[:] = self._all[first : first + len(sums)]
                first += len(sums)


def _kv_kind_of(pools: Sequence[Pool]) -> Kind:
    """Returns the number format of KV rows, which all pools of keys and values have."""
    pool = next(each for each in pools if isinstance(each, KvPool))
    if pool.layout.rotated is not None:
        return _LATENT_KV_KINDS[pool.layout.rotated.dtype]
    return _KV_KINDS[pool.layout.dtype]


def _kv_groups_of(pools: Sequence[Pool]) -> Array[KvGroup]:
    """Returns the structs that describe each KV group's pool to the C++ kernels. `forward` sets the
    fields for slots and block tables in each step."""
    return (KvGroup * len(pools))(*map(_kv_group_of, pools))


def _kv_group_of(pool: Pool) -> KvGroup:
    if isinstance(pool, RowPool):
        return KvGroup(kv=pool.memory.data_ptr(), block_bytes=pool.layout.block_bytes)
    return KvGroup(
        kv=pool.memory.data_ptr(),
        block_bytes=pool.layout.block_bytes,
        head_bytes=pool.layout.head_bytes,
        layer_bytes=pool.layout.layer_bytes,
        **_static_fields(None if isinstance(pool, StatePool) else pool.static),
    )


def _part_offsets(pool: Pool) -> Array[c_int64] | None:
    """Returns the offset in bytes of each part in a block of rows; None for other pools."""
    if not isinstance(pool, RowPool):
        return None
    sizes = [part.num * part.dim * DTYPE_BYTES[pool.layout.dtype] for part in pool.layout.parts]
    return (c_int64 * len(sizes))(*accumulate(sizes[:-1], initial=0))


def _static_fields(static: StaticKv | None) -> dict[str, int]:
    if static is None:
        return {}
    if isinstance(static, FixedScales):
        return {"fixed_scales": static.scales.data_ptr()}
    return {"key_order": static.order.data_ptr(), "key_scales": static.scales.data_ptr()}


class _Results:
    """The arrays to which the kernels write the results of a step: the logits and the most likely
    token of each row. All steps use the same memory. Otherwise the system would have to zero
    megabytes of new memory in each step."""

    def __init__(self, num_rows: int, vocab: int, room: torch.Tensor | None = None) -> None:
        """`room` is the memory of an earlier step's results. It is reused if it is large enough."""
        if room is None or len(room) < num_rows * vocab:
            room = torch.frombuffer(own_pages(max(1, num_rows) * vocab * 4), dtype=torch.float32)
        self._room = room
        self._vocab = vocab
        self.logits = room[: num_rows * vocab].view(num_rows, vocab)
        self.logits_address = self.logits.data_ptr()
        self.most_likely = array("i", bytes(4 * num_rows))

    def of(self, num_rows: int) -> _Results:
        """Returns arrays for `num_rows` rows, which reuse this object's memory if it is large
        enough."""
        if num_rows == len(self.most_likely):
            return self
        return _Results(num_rows, self._vocab, self._room)
