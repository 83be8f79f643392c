"""Steps for the model alone: a prompt's prefill in parts, and decode of many sequences together.

Blocks are the pool's first ones, in order; token ids are random, and the same in every run.
"""

from __future__ import annotations

from random import Random

from tandem.engine.cache.layout.kv_groups import layer_groups
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.errors import UnsupportedModel
from tandem.models.folder import ModelFolder
from tandem.models.source import resolve

STEP_TOKENS = 512
DECODE_CONTEXT = 256


def resolve_dense(model: str) -> ModelFolder:
    """Resolves a model whose steps read all weights, and whose KV has one group. Raises
    UnsupportedModel for others."""
    folder = resolve(model)
    if any(layer.experts for layer in folder.config.layers):
        raise UnsupportedModel(
            f"{model} has experts; this benchmark counts the work of dense models only"
        )
    if len(layer_groups(folder.config)) > 1:
        raise UnsupportedModel(
            f"{model} has layers with and without a window; this benchmark has blocks "
            "of one KV group"
        )
    return folder


def blocks_needed(block_size: int, *, prompt: int = 0, batch: int = 0) -> int:
    """Returns the blocks that a pool needs. The longest prompt and the largest batch use the same
    ones."""
    return max(-(-prompt // block_size), batch * _blocks_each(block_size))


def prefill_steps(num_tokens: int, block_size: int) -> list[StepBatch]:
    token_ids = _tokens(num_tokens)
    table = list(range(blocks_needed(block_size, prompt=num_tokens)))
    return [
        StepBatch([SequenceSlice(part, first + len(part), table, first + len(part) == num_tokens)])
        for first in range(0, num_tokens, STEP_TOKENS)
        for part in [token_ids[first : first + STEP_TOKENS]]
    ]


def decode_step(batch: int, block_size: int) -> StepBatch:
    """The last of DECODE_CONTEXT tokens of each sequence."""
    each = _blocks_each(block_size)
    return StepBatch(
        [
            SequenceSlice([token], DECODE_CONTEXT, list(range(i * each, (i + 1) * each)), True)
            for i, token in enumerate(_tokens(batch))
        ]
    )


def _blocks_each(block_size: int) -> int:
    return DECODE_CONTEXT // block_size + 1


def _tokens(count: int) -> list[int]:
    return Random(1).choices(range(100, 40_000), k=count)
