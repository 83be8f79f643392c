"""What graphs are recorded over, with stand-ins for CUDA's streams and graphs, and the inputs with
which they are replayed."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from tandem.engine.executor.triton.decode_graphs import DecodeGraphs
from tandem.engine.executor.triton.graph import Recording, StepGraph
from tandem.engine.executor.triton.inputs import StepShape, StepViews, fill
from tandem.engine.executor.triton.mixed_graphs import CHUNKS_MAX, MixedGraphs
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch

CPU = torch.device("cpu")


class Forward:
    """Notes the inputs of each pass, and gives row i of the logits the number i."""

    def __init__(self) -> None:
        self.seen: list[StepViews] = []
        self.shapes: list[tuple[int, int]] = []  # (single tokens, chunk tokens) of each pass
        self.chunks: list[tuple[list[int], list[int]]] = []  # (context_lens, query_starts)
        self.recording = Recording(self._forward, torch.zeros(40, 10), None)

    def _forward(self, views: StepViews, logits: torch.Tensor) -> None:
        self.seen.append(views)
        shape = views.shape
        self.shapes.append((shape.num_single, shape.num_tokens - shape.num_single))
        self.chunks.append((views.context_lens.tolist(), views.query_starts.tolist()))
        logits.copy_(torch.arange(len(logits))[:, None])


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())


@pytest.mark.usefixtures("as_cuda")
def test_a_graph_is_recorded_over_contexts_of_requests() -> None:
    """Each sequence has its own blocks, as far as the pool has enough."""
    forward = Forward()
    shape = StepShape(3, 3, 3, 3, 6, 2)  # 3 sequences of up to 6 blocks, 2 KV groups
    views = StepViews.of(torch.zeros(sum(shape.sizes), dtype=torch.int32), shape)
    StepGraph(views, forward.recording).record(block_size=16, num_blocks=7, context_len=40)
    assert len(forward.seen) == 2  # once to tune, once to record
    assert views.block_tables[0, :, :3].tolist() == [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    assert torch.equal(views.block_tables[0], views.block_tables[1])
    assert views.slots.eq(-1).all()


def test_graphs_have_tables_for_the_longest_context() -> None:
    forward = Forward()
    graphs = DecodeGraphs(
        forward.recording,
        num_seqs_max=3,
        max_model_len=50,
        block_size=16,
        num_blocks=7,
        num_groups=1,
        device=CPU,
    )
    assert [bucket._views.block_tables.shape for bucket in graphs._buckets] == [
        (1, num_seqs, 4) for num_seqs in (1, 2, 3)
    ]
    assert not forward.seen  # without CUDA, nothing is recorded


def mixed_graphs(forward: Forward, adapters: dict[str, int] | None = None) -> MixedGraphs:
    return MixedGraphs(
        forward.recording,
        num_seqs_max=9,
        step_tokens=70,
        max_model_len=128,
        block_size=16,
        num_blocks=20,
        num_groups=2,
        device=CPU,
        adapters=adapters,
        num_adapters=3,
    )


@pytest.mark.usefixtures("as_cuda")
def test_steps_with_chunks_are_recorded_with_all_tokens_in_one_chunk() -> None:
    forward = Forward()
    graphs = mixed_graphs(forward)
    graphs._record(20, 100)
    shapes = [(s, c) for s in (9, 8, 0) for c in (70, 64, 32)]
    assert forward.shapes == [shape for shape in shapes for _ in range(2)]
    for (num_single, num_chunk_tokens), (lens, starts) in zip(
        forward.shapes, forward.chunks, strict=True
    ):
        assert lens == [100] * (num_single + 1) + [0] * (CHUNKS_MAX - 1)
        assert starts == [0] + [num_chunk_tokens] * CHUNKS_MAX


@pytest.mark.usefixtures("as_cuda")
def test_steps_with_adapters_have_graphs_of_their_own() -> None:
    forward = Forward()
    graphs = mixed_graphs(forward, adapters={})
    graphs._record(20, 100)
    with_adapters = [(s, c) for is_adapted, s, c in graphs._graphs if is_adapted]
    assert with_adapters == [(s, c) for s in (0, 8, 9) for c in (0, 32, 64, 70) if s or c]
    shape = graphs._graphs[True, 8, 0].views.shape
    assert (shape.num_tokens, shape.num_seqs, shape.num_chunks) == (8, 8, 0)
    for (_, single, tokens), graph in graphs._graphs.items():
        is_adapted = graph.views.shape.num_tiles > 0
        # Each of three adapters may leave one tile partly empty.
        assert graph.views.shape.num_tiles == ((single + tokens) // 16 + 3 if is_adapted else 0)


def test_rows_of_adapters_are_in_tiles() -> None:
    forward = Forward()
    adapters = {"first": 2, "second": 1}
    graphs = mixed_graphs(forward, adapters=adapters)
    pieces = [
        chunk(18)._replace(adapter="first"),
        chunk(1)._replace(adapter="second"),
        chunk(3),
        chunk(1)._replace(adapter="first"),
    ]
    assert graphs.fits(StepBatch(pieces))
    assert graphs.fits(StepBatch([pieces[1]]))  # a decode step
    assert not graphs.fits(StepBatch([pieces[1]._replace(adapter="")]))
    graphs.run(StepBatch(pieces))
    tiles = forward.seen[-1].tiles
    assert tiles.adapters.tolist() == [1, 2, 2, 0, 0]  # 40 rows, and three adapters at most
    rows = tiles.rows.view(-1, 16)
    assert rows[0].tolist() == [0, *[-1] * 15]
    assert rows[1:3].flatten().tolist() == [1, *range(8, 26), *[-1] * 13]
    assert rows[3:].eq(-1).all()


def chunk(num_tokens: int, *, wants_logits: bool = True) -> SequenceSlice:
    blocks = [3, 4, 5, 6, 7, 8, 9]
    return SequenceSlice(
        list(range(1, num_tokens + 1)), 40 + num_tokens, blocks, wants_logits, other_tables=[blocks]
    )


def test_which_steps_are_replayed() -> None:
    fits = mixed_graphs(Forward()).fits
    single = chunk(1)
    assert fits(StepBatch([chunk(5)]))
    assert fits(StepBatch([chunk(20), single, chunk(50)]))
    assert not fits(StepBatch([single]))  # a decode step
    assert not fits(StepBatch([chunk(20), chunk(51)]))
    assert fits(StepBatch([chunk(2)] * (CHUNKS_MAX - 1)))
    assert not fits(StepBatch([chunk(2)] * CHUNKS_MAX))
    assert fits(StepBatch([chunk(2), *[single] * 9]))
    assert not fits(StepBatch([chunk(2), *[single] * 10]))
    for change in ({"wants_hidden": True}, {"all_logits": True}, {"adapter": "digest"}):
        assert not fits(StepBatch([chunk(2)._replace(**change)]))


def test_a_step_is_padded_to_the_next_graph() -> None:
    forward = Forward()
    graphs = mixed_graphs(forward)
    first, second, single = chunk(20, wants_logits=False), chunk(15), chunk(1)
    graphs.run(StepBatch([chunk(64), *[single] * 8]))  # leaves numbers behind in the arrays
    logits = graphs.run(StepBatch([first, single, second]))
    assert logits[:, 0].tolist() == [0, 1]
    views = forward.seen[-1]
    assert (views.shape.num_single, views.shape.num_tokens) == (8, 72)
    assert views.context_lens.tolist() == [41] + [0] * 7 + [60, 55, 72 - 8 - 35] + [0] * 5
    assert views.query_starts.tolist() == [0, 20, 35] + [64] * 6
    assert views.logit_rows[:2].tolist() == [0, 8 + 35 - 1]
    assert views.token_ids[8 + 20 : 8 + 36].tolist() == [*range(1, 16), 0]
    rows = [0, *range(8, 8 + 35)]
    is_stored = (views.slots[1] >= 0).nonzero().flatten().tolist()
    assert is_stored == rows
    assert views.slots[1, 8 + 20].item() == 5 * 16 + 8  # position 40 is in the third block
    assert views.block_tables[1, 8, :4].tolist() == [3, 4, 5, 6]


def test_a_step_without_room_for_its_padding_is_refused() -> None:
    shape = StepShape(8, 1, 0, 1, 7, 2)
    views = StepViews.of(torch.zeros(sum(shape.sizes), dtype=torch.int32), shape)
    with pytest.raises(IndexError):
        fill(views, StepBatch([chunk(5)]), 16)
