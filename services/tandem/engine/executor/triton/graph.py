"""A forward pass that a CUDA graph records once and then replays.

The host takes longer to launch the many small kernels of a step of few tokens than the device takes
to run them. So a graph records these kernels, with every tensor at a fixed address. A step copies
its inputs to these addresses and replays the graph with a single launch.

Without CUDA, that is, in Triton's interpreter, nothing is recorded and the kernels run directly.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tandem.engine.executor.triton.inputs import StepViews


class Recording(NamedTuple):
    """What all graphs of a worker share, so that memory has it once: only one of them runs at a
    time."""

    # Computes a step and writes the logits to the second argument.
    forward: Callable[[StepViews, torch.Tensor], object]
    logits: torch.Tensor  # fp32 [largest number of rows, this rank's share of the vocabulary]
    pool: Any  # handle of the graphs' memory pool; None without CUDA


class StepGraph:
    """A step over inputs at fixed addresses, `views`."""

    def __init__(self, views: StepViews, recording: Recording) -> None:
        self.views = views
        self._recording = recording
        self._logits = recording.logits[: views.shape.num_logits]
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> torch.Tensor:
        """Computes a step over the current inputs. Returns this rank's share of the fp32 logits,
        [num_logits, share of the vocabulary], which is valid until a graph runs again."""
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()
        return self._logits

    def _forward(self) -> None:
        self._recording.forward(self.views, self._logits)

    def record(self, block_size: int, num_blocks: int, context_len: int) -> None:
        """Records the graph. The kernels first run once without recording, which compiles and tunes
        them. The caller has set the lengths of contexts, which are at most `context_len` tokens,
        and the chunks.

        The run stores no KV in the pool of `num_blocks` blocks, and changes no state.
        """
        views = self.views
        views.slots.fill_(-1)
        views.states.zero_()
        # The blocks of one sequence after those of the sequence before, as far as there are blocks.
        width = -(-context_len // block_size)
        firsts = torch.arange(views.shape.num_seqs)[:, None] * width
        tables = firsts + torch.arange(views.shape.table_width)
        views.block_tables.copy_(tables % num_blocks)
        views.logit_rows.copy_(torch.arange(views.shape.num_logits) % views.shape.num_tokens)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=self._recording.pool):
            self._forward()
