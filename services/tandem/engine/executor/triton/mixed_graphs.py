"""Runs steps with chunks of prompts, and steps with LoRA adapters, as CUDA graphs.

There is one graph for each pair of a number of single tokens and a number of chunk tokens. A step
is padded to the next pair. With single tokens 0, 8 and 32 and chunk tokens 32, 64 and 128, a step
of 3 single tokens and two chunks of 40 tokens replays the graph of 8 and 128: its rows are

    0 to 2    single tokens       8 to 87      chunks
    3 to 7    padding             88 to 135    padding, which is a chunk of its own

Steps with more tokens are not recorded: the device takes longer to compute them than the host to
launch their kernels. Steps with LoRA adapters have graphs of their own, also without chunks. They
launch the adapters' kernels for each product, and read from a table which adapter changes it.
"""

import logging
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

import torch

from tandem.engine.executor.triton.graph import Recording, StepGraph
from tandem.engine.executor.triton.inputs import (
    NO_ADAPTERS,
    StepShape,
    StepViews,
    fill,
    shape_of,
)
from tandem.engine.executor.triton.tuning_shapes import tuned_context
from tandem.engine.scheduler.batch import StepBatch
from tandem_kernels.triton.lora import TILE_ROWS

log = logging.getLogger(__name__)

_CHUNK_TOKENS = (32, 64, 128, 192, 256, 384, 512)
_SINGLE_TOKENS = (0, 8, 32, 128)
CHUNKS_MAX = 8  # chunks of a step, with that of padding


class MixedGraphs:
    """Records the graphs, and runs steps with chunks by replaying them."""

    def __init__(
        self,
        recording: Recording,
        *,
        num_seqs_max: int,
        step_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        num_groups: int,
        device: torch.device,
        adapters: Mapping[str, int] | None = None,
        num_adapters: int = 0,
    ) -> None:
        """On a CUDA device, compiles and tunes the kernels and records all graphs. `step_tokens` is
        the largest number of tokens of a step. `adapters` has the numbers of the adapters that are
        loaded at the time of a step, at most `num_adapters`; None: steps with adapters are not
        recorded."""
        self._adapters = adapters
        largest = min(step_tokens, _CHUNK_TOKENS[-1])
        self._chunk_tokens = [size for size in _CHUNK_TOKENS if size < largest] + [largest]
        self._singles = [size for size in _SINGLE_TOKENS if size < num_seqs_max] + [num_seqs_max]
        self._block_size = block_size
        is_cuda = device.type == "cuda"
        table_width = -(-max_model_len // block_size)
        sizes = [(False, s, c) for s in self._singles for c in self._chunk_tokens]
        if adapters is not None:
            chunk_tokens = [0, *self._chunk_tokens]
            sizes += [(True, s, c) for s in self._singles for c in chunk_tokens if s or c]
        shapes = [
            StepShape(
                num_single + num_chunk_tokens,
                num_seqs := num_single + (CHUNKS_MAX if num_chunk_tokens else 0),
                num_single,
                num_seqs,
                table_width,
                num_groups,
                (num_single + num_chunk_tokens) // TILE_ROWS + num_adapters if is_adapted else 0,
            )
            for is_adapted, num_single, num_chunk_tokens in sizes
        ]
        # All graphs share their inputs, which have room for the largest.
        self._on_host = torch.empty(
            max(sum(shape.sizes) for shape in shapes), dtype=torch.int32, pin_memory=is_cuda
        )
        self._on_device = torch.zeros_like(self._on_host, device=device)
        # The tables are wide enough for the longest context, but only the entries that a step needs
        # are copied: they are at the end of the step's array, and a second copy puts them here.
        self._tables = torch.zeros(
            num_groups,
            max(shape.num_seqs for shape in shapes),
            table_width,
            dtype=torch.int32,
            device=device,
        )
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self._graphs = {
            size: StepGraph(self._views_of(shape), recording)
            for size, shape in zip(sizes, shapes, strict=True)
        }
        if is_cuda:
            context_len = tuned_context(
                num_seqs_max, pool_tokens=num_blocks * block_size, max_model_len=max_model_len
            )
            self._record(num_blocks, max(context_len, largest))
            log.info(
                "recorded CUDA graphs for steps with up to %d prompt tokens and up to %d decoding "
                "sequences",
                largest,
                num_seqs_max,
            )

    def _views_of(self, shape: StepShape) -> StepViews:
        views = StepViews.of(self._on_device[: sum(shape.sizes)], shape)
        return replace(views, block_tables=self._tables[:, : shape.num_seqs])

    def _record(self, num_blocks: int, context_len: int) -> None:
        """Records the graphs over contexts of `context_len` tokens. One chunk has all tokens."""
        # The largest graph is recorded first, so that later graphs reuse its memory.
        for graph in reversed(self._graphs.values()):
            views = graph.views
            num_single = views.shape.num_single
            views.tiles.rows.fill_(-1)
            views.tiles.adapters.zero_()
            views.context_lens.zero_()
            views.context_lens[: num_single + 1] = context_len
            views.query_starts[0] = 0
            views.query_starts[1:] = views.shape.num_tokens - num_single
            graph.record(self._block_size, num_blocks, context_len)

    def fits(self, batch: StepBatch) -> bool:
        """Returns whether a graph can replay this step.

        A graph cannot replay a step that needs hidden states, or the logits of more than one token
        of a sequence.
        """
        chunks = [piece.num_tokens for piece in batch.slices if piece.num_tokens > 1]
        is_adapted = any(piece.adapter for piece in batch.slices)
        return (
            (self._adapters is not None if is_adapted else bool(chunks))
            and len(chunks) < CHUNKS_MAX
            and sum(chunks) <= self._chunk_tokens[-1]
            and len(batch.slices) - len(chunks) <= self._singles[-1]
            and all(s.num_logits <= 1 and not s.wants_hidden for s in batch.slices)
        )

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Returns fp32 logits [rows, vocab], with a row for each slice that wants logits. They are
        valid until a graph runs again."""
        if self._copied is not None:
            # The host may be a step ahead of the device, so the array may still be in use.
            self._copied.synchronize()
        own = shape_of(batch)
        num_chunk_tokens = own.num_tokens - own.num_single
        single = self._singles[bisect_left(self._singles, own.num_single)]
        chunk = 0
        if num_chunk_tokens:
            chunk = self._chunk_tokens[bisect_left(self._chunk_tokens, num_chunk_tokens)]
        is_adapted = any(piece.adapter for piece in batch.slices)
        graph = self._graphs[is_adapted, single, chunk]
        shape = replace(graph.views.shape, table_width=own.table_width)
        size = sum(shape.sizes)
        on_host = StepViews.of(self._on_host[:size], shape)
        fill(on_host, batch, self._block_size, self._adapters or NO_ADAPTERS)
        on_device = self._on_device[:size]
        on_device.copy_(self._on_host[:size], non_blocking=True)
        tables = StepViews.of(on_device, shape).block_tables
        graph.views.block_tables[..., : own.table_width].copy_(tables)
        if self._copied is not None:
            self._copied.record()
        return graph.run()[: own.num_logits]
