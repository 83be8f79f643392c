"""The same decoder as model.py, computed by C++ on the CPU (kernels/native).

Activations and sums are fp32; weights stay as the checkpoint has them (bf16 or fp32) or become
int8 with a scale for each output. Every output is summed in one order, whatever shares the step,
so a sequence's tokens depend on itself alone: this is both the fast and the invariant path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kernels.native.library import PANEL, Kind, Layer, Library, Matrix, Model, Step, address, load
from kernels.rope import rotary_angles
from services.engine.batch import StepBatch
from services.engine.model import rope_frequencies
from services.engine.weights import LayerWeights, Linear, ModelWeights
from services.models.config import ModelConfig

_KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
_INT32_MAX = 2**31 - 1


def why_not_native(config: ModelConfig) -> str:
    """Why a model cannot be computed by it; empty if it can."""
    if load() is None:
        return "they were not built (no C++ compiler at install?)"
    if config.head_dim % PANEL:
        return f"the head size {config.head_dim} is not a multiple of {PANEL}"
    return ""


class NativeDecoder:
    """`forward` is not to be called from two threads at once."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        num_threads: int,
        int8: bool = False,
        instructions: str | None = None,
    ) -> None:
        """Packs the weights; only the embedding's tensor is kept."""
        library = load()
        assert library is not None
        self._library: Library = library
        self._config = config
        self._int8 = int8
        self._kept: list[Any] = []  # what the structs point to
        self._frequencies = rope_frequencies(config)
        scaling = config.rope_scaling
        self._angle_scale = scaling.attention_factor if scaling else 1.0
        layers = (Layer * config.num_layers)(*map(self._layer, weights.layers))
        embedding = weights.embedding.contiguous()
        self._kept += [layers, embedding]
        self._model = Model(
            layers=layers,
            final_norm=self._floats(weights.final_norm),
            embedding=embedding.data_ptr(),
            output=self._matrix((Linear(weights.output, None),)),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            embedding_kind=_KINDS[embedding.dtype],
            norm_eps=config.rms_norm_eps,
            num_threads=num_threads,
        )
        self._decoder = library.create(self._model, instructions)
        self.instructions = library.instructions(instructions)

    def __del__(self) -> None:
        if decoder := getattr(self, "_decoder", 0):
            self._library.destroy(decoder)

    def forward(
        self,
        batch: StepBatch,
        kv: torch.Tensor,
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Writes the tokens' KV into the pool `kv`, of BlockLayout's shape; fp32 logits [slices
        that want them, vocab]. `on_kv_written` is called when all KV is in the pool."""
        inputs = _Inputs(batch, kv.shape[4])
        positions = torch.from_numpy(inputs.positions)
        cosines, sines = (
            angles.squeeze(1).contiguous()
            for angles in rotary_angles(positions, self._frequencies, self._angle_scale)
        )
        logits = torch.empty(len(inputs.logit_rows), self._config.vocab_size)
        step = Step(
            token_ids=address(inputs.token_ids),
            slots=address(inputs.slots),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            spans=address(inputs.spans),
            block_tables=address(inputs.block_tables),
            logit_rows=address(inputs.logit_rows),
            kv=kv.data_ptr(),
            logits=logits.data_ptr(),
            num_rows=len(inputs.token_ids),
            num_spans=len(inputs.spans),
            num_logit_rows=len(inputs.logit_rows),
            block_size=kv.shape[4],
            kv_kind=_KINDS[kv.dtype],
        )
        self._library.to_last_kv(self._decoder, step)
        if on_kv_written is not None:
            on_kv_written()
        self._library.to_logits(self._decoder, step)
        return logits

    def _layer(self, weights: LayerWeights) -> Layer:
        return Layer(
            attention_norm=self._floats(weights.attention_norm),
            q_norm=self._floats(weights.q_norm),
            k_norm=self._floats(weights.k_norm),
            mlp_norm=self._floats(weights.mlp_norm),
            qkv=self._matrix(weights.qkv),
            attention_out=self._matrix((weights.attention_out,)),
            gate_up=self._matrix(weights.gate_up),
            down=self._matrix((weights.down,)),
        )

    def _matrix(self, parts: Sequence[Linear]) -> Matrix:
        """The rows of all parts, one below the other."""
        weight = parts[0].weight if len(parts) == 1 else torch.cat([p.weight for p in parts])
        weight = weight.contiguous()
        num_out, num_in = weight.shape
        kind = Kind.I8 if self._int8 else _KINDS[weight.dtype]
        panels, scales = self._library.pack(
            weight.data_ptr(), _KINDS[weight.dtype], (num_out, num_in), kind
        )
        biases = [p.bias for p in parts if p.bias is not None]
        self._kept += [panels, scales]
        return Matrix(
            panels=address(panels),
            scales=address(scales),
            bias=self._floats(torch.cat(biases)) if biases else None,
            num_in=num_in,
            num_out=num_out,
            kind=kind,
        )

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        floats = tensor.float().contiguous()
        self._kept.append(floats)
        return floats.data_ptr()


class _Inputs:
    """A step's batch as arrays: rows are its tokens, sequence after sequence."""

    def __init__(self, batch: StepBatch, block_size: int) -> None:
        token_ids: list[int] = []
        spans: list[tuple[int, int, int, int]] = []
        tables: list[int] = []
        places: list[range] = []
        logit_rows: list[int] = []
        for piece in batch.slices:
            num_blocks = -(-piece.context_len // block_size)
            spans.append((len(token_ids), piece.num_tokens, piece.context_len, len(tables)))
            token_ids += piece.token_ids
            tables += piece.block_table[:num_blocks]
            places.append(range(piece.context_len - piece.num_tokens, piece.context_len))
            if piece.wants_logits:
                logit_rows.append(len(token_ids) - 1)
        self.token_ids = np.array(token_ids, np.int32)
        self.spans = np.array(spans, np.int32).reshape(-1, 4)
        self.block_tables = np.array(tables, np.int32)
        self.logit_rows = np.array(logit_rows, np.int32)
        self.positions = np.concatenate([np.arange(p.start, p.stop) for p in places])
        first_entry = np.repeat(self.spans[:, 3], self.spans[:, 1])
        blocks = self.block_tables[first_entry + self.positions // block_size]
        slots = blocks.astype(np.int64) * block_size + self.positions % block_size
        assert slots.max() <= _INT32_MAX
        self.slots = slots.astype(np.int32)
