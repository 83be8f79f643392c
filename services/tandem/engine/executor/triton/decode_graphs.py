"""Runs decode steps as CUDA graphs, with one graph for each of several batch sizes.

A batch is padded to the next recorded size: with sizes 1, 2, 4 and 8, a batch of 5 sequences
replays the graph of 8.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence

import torch

from tandem.engine.executor.triton.graph import Recording, StepGraph
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
        recording: Recording,
        *,
        num_seqs_max: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        num_groups: int,
        device: torch.device,
        num_states: int = 0,
        rows: type[DecodeRows] = DecodeRows,
    ) -> None:
        """On a CUDA device, compiles and tunes the kernels and records all graphs. `rows` chooses
        the row of each sequence."""
        self._sizes = bucket_sizes(num_seqs_max)
        table_width = -(-max_model_len // block_size)
        shapes = [
            StepShape(n, n, n, n, table_width, num_groups, num_states=num_states)
            for n in self._sizes
        ]
        pool_tokens = num_blocks * block_size

        def context_of(shape: StepShape) -> int:
            return tuned_context(
                shape.num_seqs, pool_tokens=pool_tokens, max_model_len=max_model_len
            )

        # The largest graph is recorded first, so that later graphs reuse its memory.
        self._buckets = [
            _Bucket(shape, recording, block_size, num_blocks, context_of(shape), device, rows)
            for shape in reversed(shapes)
        ][::-1]
        if device.type == "cuda":
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
        """Returns fp32 logits [slices, vocab]. They are valid until a graph runs again."""
        bucket = self._buckets[bisect_left(self._sizes, len(slices))]
        return bucket.run(slices)[: len(slices)]


class _Bucket:
    def __init__(
        self,
        shape: StepShape,
        recording: Recording,
        block_size: int,
        num_blocks: int,
        context_len: int,
        device: torch.device,
        rows: type[DecodeRows] = DecodeRows,
    ) -> None:
        """The graph is recorded with contexts of `context_len` tokens."""
        is_cuda = device.type == "cuda"
        self._on_host = torch.empty(sum(shape.sizes), dtype=torch.int32, pin_memory=is_cuda)
        self._rows = rows(self._on_host, shape)
        self._on_device = torch.zeros_like(self._on_host, device=device)
        self._views = StepViews.of(self._on_device, shape)
        self._block_size = block_size
        self._graph = StepGraph(self._views, recording)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        if is_cuda:
            self._views.context_lens.fill_(context_len)
            self._graph.record(block_size, num_blocks, context_len)

    def run(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        if self._copied is not None:
            # The host may be a step ahead of the device, so the array may still be in use.
            self._copied.synchronize()
        changed = self._rows.write(slices, self._block_size)
        self._copy(changed)
        if self._copied is not None:
            self._copied.record()
        return self._graph.run()

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
