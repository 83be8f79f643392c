"""What a decode graph is recorded over, with stand-ins for CUDA's streams and graphs."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from tandem.engine.executor.triton.decode_graphs import DecodeGraphs, _Bucket
from tandem.engine.executor.triton.inputs import StepShape, StepViews


def test_a_graph_is_recorded_over_contexts_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence has its own blocks, as far as the pool has enough."""
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    seen: list[StepViews] = []

    def forward(views: StepViews) -> torch.Tensor:
        seen.append(views)
        return torch.zeros(views.shape.num_logits, 10)

    shape = StepShape(3, 3, 3, 3, 6, 2)  # 3 sequences of up to 6 blocks, 2 KV groups
    bucket = _Bucket(shape, forward, 16, 7, 40, torch.device("cpu"), None)
    bucket._record(num_blocks=7, context_len=40, pool=None)
    assert len(seen) == 2  # once to tune, once to record
    views = seen[0]
    assert views.context_lens.tolist() == [40, 40, 40]
    assert views.block_tables[0, :, :3].tolist() == [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    assert torch.equal(views.block_tables[0], views.block_tables[1])
    assert views.slots.eq(-1).all()


def test_graphs_have_tables_for_the_longest_context() -> None:
    seen: list[StepViews] = []

    def forward(views: StepViews) -> torch.Tensor:
        seen.append(views)
        return torch.zeros(views.shape.num_logits, 10)

    graphs = DecodeGraphs(
        forward,
        num_seqs_max=3,
        max_model_len=50,
        block_size=16,
        num_blocks=7,
        num_groups=1,
        device=torch.device("cpu"),
    )
    assert [bucket._views.block_tables.shape for bucket in graphs._buckets] == [
        (1, num_seqs, 4) for num_seqs in (1, 2, 3)
    ]
    assert not seen  # without CUDA, nothing is recorded
