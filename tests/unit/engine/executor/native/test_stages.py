"""The stages of a step: the compiled decoder's times, and the bench's floors."""

from __future__ import annotations

import time
from dataclasses import replace

from tandem.engine.executor.native.decoder import NativeDecoder
from tandem_bench.engine_stages import Needs, needs
from tandem_bench.engine_steps import blocks_needed, decode_step, prefill_steps
from tandem_kernels.native.library import Stage
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.native_shapes import BASE


def test_the_stages_of_a_step_are_its_time_and_are_taken_once() -> None:
    decoder = NativeDecoder(
        native_shapes.config_of(BASE), native_shapes.random_weights(BASE), num_threads=2
    )
    kv = native_shapes.pool(BASE)
    began = time.perf_counter()
    for batch in native_shapes.batches(BASE):
        decoder.forward(batch, [kv])
    took = time.perf_counter() - began
    stages = decoder.take_stages()
    assert min(stages.values()) > 0
    assert sum(stages.values()) < took
    assert set(decoder.take_stages().values()) == {0.0}


def test_a_bound_counts_each_weight_once_a_step_and_each_key_that_a_query_sees() -> None:
    """2 layers, 6 heads and 2 KV heads of 64, hidden 40, inner 52, vocabulary 61."""
    config = native_shapes.config_of(BASE)
    of_two = needs(config, [decode_step(2, 16)], weight_bytes=2, kv_bytes=4)
    assert of_two[Stage.QKV] == Needs(2 * 2 * (2 * 40 * 640), 2 * (2 * 40 * 640))
    assert of_two[Stage.OUTPUT] == Needs(2 * 2 * (40 * 61), 2 * (40 * 61))
    keys = 2 * 2 * 256  # layers, sequences, context
    assert of_two[Stage.ATTENTION] == Needs(4 * 6 * 64 * keys, 2 * 2 * 64 * keys * 4)
    assert Stage.NORM not in of_two
    prompt = needs(replace(config, layers=config.layers[:1]), prefill_steps(1000, 16), 1, 1)
    assert prompt[Stage.ATTENTION].operations == 4 * 6 * 64 * (1000 * 1001 / 2)
    assert prompt[Stage.ATTENTION].bytes_read == 2 * 2 * 64 * (512 + 1000)
    assert prompt[Stage.DOWN].bytes_read == 2 * 52 * 40
    assert prompt[Stage.OUTPUT].operations == 2 * 40 * 61


def test_steps_use_the_blocks_that_they_say() -> None:
    assert blocks_needed(16, prompt=1000, batch=3) == 63
    assert blocks_needed(16, prompt=10, batch=3) == 51
    blocks = [block for piece in decode_step(3, 16).slices for block in piece.block_table]
    assert blocks == list(range(51))
    parts = [step.slices[0] for step in prefill_steps(1000, 16)]
    assert [(p.num_tokens, p.context_len, p.wants_logits) for p in parts] == [
        (512, 512, False),
        (488, 1000, True),
    ]
