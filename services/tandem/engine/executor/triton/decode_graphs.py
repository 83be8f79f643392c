"""Runs decode steps as CUDA graphs, with one graph for each of several batch sizes.

The host takes longer to launch the many small kernels of a decode step than the device takes to run
them. So a graph records these kernels once, with every tensor at a fixed address. A step copies its
inputs to these addresses and replays the graph with a single launch. A batch is padded to the next
recorded size: with sizes 1, 2, 4 and 8, a batch of 5 sequences replays the graph of 8.

Without CUDA, that is, in Triton's interpreter, nothing is recorded and the kernels run directly.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem.engine.executor.triton.inputs import DecodeRows, StepShape, StepViews
from tandem.engine.executor.triton.tuning_shapes import tuned_context
from tandem.engine.scheduler.batch import SequenceSlice

log = logging.getLogger(__name__)

# A copy to the device takes as long as it takes to copy this many entries more: about 2.5 us at
# 25 GB/s.
_COPY_ENTRIES = 1 << 14


def bucket_sizes(num_seqs_max: int) -> list[int]:
    """Returns the batch sizes for which graphs are recorded, up to `num_seqs_max`. For example, 100
    gives 1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96 and 100. Above 256, sizes are 64 apart."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, num_seqs_max, 64)]
    return [size for size in sizes if size < num_seqs_max] + [num_seqs_max]


class DecodeGraphs:
    """Records the graphs, and runs decode steps by replaying them."""

    def __init__(
        self,
        forward: Callable[[StepViews], torch.Tensor],
        *,
        num_seqs_max: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        num_groups: int,
        device: torch.device,
        rows: type[DecodeRows] = DecodeRows,
    ) -> None:
        """On a CUDA device, compiles and tunes the kernels and records all graphs. `rows` chooses
        the row of each sequence."""
        self._sizes = bucket_sizes(num_seqs_max)
        table_width = -(-max_model_len // block_size)
        shapes = [StepShape(n, n, n, n, table_width, num_groups) for n in self._sizes]
        pool_tokens = num_blocks * block_size

        def context_of(shape: StepShape) -> int:
            return tuned_context(
                shape.num_seqs, pool_tokens=pool_tokens, max_model_len=max_model_len
            )

        # The largest graph is recorded first, so that later graphs reuse its memory.
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._buckets = [
            _Bucket(shape, forward, block_size, num_blocks, context_of(shape), device, pool, rows)
            for shape in reversed(shapes)
        ][::-1]
        if pool is not None:
            sizes = ", ".join(map(str, self._sizes))
            log.info("recorded CUDA graphs of decode steps with %s sequences", sizes)

    def fits(self, slices: Sequence[SequenceSlice]) -> bool:
        """Returns whether these slices are a decode step that a graph can replay.

        A graph cannot replay a step with adapters, because such steps launch different kernels. Nor
        can it replay a step that needs hidden states, because a replay does not keep them.
        """
        return 0 < len(slices) <= self._sizes[-1] and all(
            s.num_tokens == 1 and not (s.wants_hidden or s.adapter) for s in slices
        )

    def run(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Returns fp32 logits [slices, vocab]. They are valid until the next call."""
        bucket = self._buckets[bisect_left(self._sizes, len(slices))]
        return bucket.run(slices)[: len(slices)]


class _Bucket:
    def __init__(
        self,
        shape: StepShape,
        forward: Callable[[StepViews], torch.Tensor],
        block_size: int,
        num_blocks: int,
        context_len: int,
        device: torch.device,
        pool: Any,
        rows: type[DecodeRows] = DecodeRows,
    ) -> None:
        """The graph is recorded with contexts of `context_len` tokens."""
        is_cuda = device.type == "cuda"
        self._on_host = torch.empty(sum(shape.sizes), dtype=torch.int32, pin_memory=is_cuda)
        self._rows = rows(self._on_host, shape)
        self._on_device = torch.zeros_like(self._on_host, device=device)
        self._views = StepViews.of(self._on_device, shape)
        self._forward = forward
        self._block_size = block_size
        self._graph: torch.cuda.CUDAGraph | None = None
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        if is_cuda:
            self._record(num_blocks, context_len, pool)

    def run(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        if self._copied is not None:
            # The host may be a step ahead of the device, so the array may still be in use.
            self._copied.synchronize()
        changed = self._rows.write(slices, self._block_size)
        self._copy(changed)
        if self._copied is not None:
            self._copied.record()
        if self._graph is None:
            return self._forward(self._views)
        self._graph.replay()
        return self._logits

    def _copy(self, changed: Sequence[tuple[int, int, int, int]]) -> None:
        """Copies the inputs to the device: of the block tables, only what has changed, unless one
        copy of all tables is faster than many small ones."""
        num_others = self._on_host.numel() - self._views.block_tables.numel()
        if len(changed) * _COPY_ENTRIES >= self._views.block_tables.numel():
            self._on_device.copy_(self._on_host, non_blocking=True)
            return
        self._on_device[:num_others].copy_(self._on_host[:num_others], non_blocking=True)
        shape = self._views.shape
        for group, row, first, end in changed:
            start = num_others + (group * shape.num_seqs + row) * shape.table_width
            part = slice(start + first, start + end)
            self._on_device[part].copy_(self._on_host[part], non_blocking=True)

    def _record(self, num_blocks: int, context_len: int, pool: Any) -> None:
        """Records the graph. The kernels first run once without recording, which compiles and tunes
        them over contexts of `context_len` tokens.

        The run stores no KV in the pool.
        """
        views = self._views
        views.slots.fill_(-1)
        # The blocks of one sequence after those of the sequence before, as far as there are blocks.
        width = -(-context_len // self._block_size)
        firsts = torch.arange(views.shape.num_seqs)[:, None] * width
        tables = firsts + torch.arange(views.shape.table_width)
        views.block_tables.copy_(tables % num_blocks)
        views.context_lens.fill_(context_len)
        views.logit_rows.copy_(torch.arange(views.shape.num_logits))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(views)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits = self._forward(views)
