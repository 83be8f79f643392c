"""The bytes of a prompt's KV that move to a peer, with and without windows, as predicted."""

from __future__ import annotations

import itertools

import pytest

from tandem.engine.cache.kv_cache import BlockDemand, KvCache
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvGroup, KvLayout
from tandem.engine.cache.transfer_order import transfer_order
from tandem.engine.types import Mode
from tests.engine_driver import drive, make_spec
from tests.grouped_toy import Windows, make_grouped_engine

ALL_WINDOWS: list[Windows] = [(None,), (None, 3), (5,), (None, 7), (None, 4, 9), (1,)]


def test_what_a_prompt_of_gemma_3s_shape_moves() -> None:
    """4,000 tokens of 18 layers, 15 of them with a window of 512: 0.2767 of one pool's bytes."""
    sizes = {"num_kv_heads": 1, "block_size": 16, "head_dim": 256, "dtype": "bfloat16"}
    full, window = (BlockLayout(300, num_layers=count, **sizes) for count in (3, 15))
    layout = KvLayout((KvGroup((5, 11, 17), None, full), KvGroup((0,), 512, window)))
    one_pool = BlockLayout(300, num_layers=18, **sizes)
    kv, num_blocks = KvCache(layout), 250
    tables = kv.reserve(BlockDemand(num_tokens=4000, resume=249 * 16))
    assert tables is not None
    moved = transfer_order(layout, tables, 0, num_blocks, depth=249)
    assert layout.spans.num_bytes(moved) / (num_blocks * one_pool.block_bytes) < 0.277
    assert len(moved) == 250 + 33


@pytest.mark.parametrize("windows", ALL_WINDOWS)
def test_the_bytes_that_are_predicted_to_move_are_those_that_move(windows: Windows) -> None:
    """The time of their pulls agrees, chunk by chunk."""
    engine, _ = make_grouped_engine(windows, num_blocks=64, max_num_seqs=4, max_tokens_per_step=7)
    size, spans = engine.layout.block_size, engine.layout.spans
    for num_tokens, cached in itertools.product(range(1, 34), (0, 1, 4)):
        prompt, num_blocks = [num_tokens] * num_tokens, engine.layout.blocks_of(num_tokens)
        if cached >= num_blocks:
            continue
        spec = make_spec(
            "s",
            prompt,
            mode=Mode.PREFILL_ONLY,
            first_wanted_block=cached,
            consumer_rate=(0.0, 1000.0),
        )
        engine.add(spec)
        link = engine._scheduler._link(engine._sequences["s"])
        assert link is not None
        reports = drive(engine).reports
        engine.remove("s")
        runs = [run.block_ids for report in reports for run in report.final_blocks]
        moved_bytes = sum(map(spans.num_bytes, runs))
        assert engine.unmeasured_rates.moved_bytes(num_blocks - cached) == moved_bytes
        starts = range(cached * size, num_blocks * size, size)
        parts = [link.pull_s(size, context) for context in starts]
        assert sum(parts) * 1000.0 == pytest.approx(moved_bytes)
