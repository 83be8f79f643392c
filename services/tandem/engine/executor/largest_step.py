"""Builds the step with which the memory of steps is measured."""

from __future__ import annotations

from collections.abc import Collection

from tandem.engine.scheduler.batch import SequenceSlice, StepBatch


def largest_step(
    step_tokens: int,
    num_seqs_max: int,
    *,
    max_model_len: int,
    block_size: int,
    blocks_max: int,
    num_groups: int,
    state_groups: Collection[int] = (),
) -> tuple[StepBatch, int]:
    """Returns a step with as many tokens and sequences as the scheduler allows, and the number of
    blocks that each KV group's pool needs for it. The pools of `state_groups` need one slot for
    each sequence.

    The first sequences have chunks of a prompt, the others decode one token each:

        step_tokens 100, num_seqs_max 4, max_model_len 60  ->  60, 38, 1 and 1 tokens

    Kernels are tuned while they compute this step. The contexts of the sequences that decode are
    therefore as long as `blocks_max` blocks in a pool allow. If even the shortest contexts need
    more than `blocks_max` blocks, more are used.
    """
    num_seqs = min(num_seqs_max, max(1, step_tokens - 1))
    left = min(step_tokens, num_seqs * max_model_len)
    lengths: list[int] = []
    for num_others in reversed(range(num_seqs)):
        lengths.append(min(max_model_len, left - num_others))
        left -= lengths[-1]
    chunk_blocks = sum(-(-length // block_size) for length in lengths if length > 1)
    num_single = lengths.count(1)
    width = (blocks_max - chunk_blocks) // max(1, num_single)
    width = max(1, min(width, max_model_len // block_size))
    slices: list[SequenceSlice] = []
    first = 0
    for length in lengths:
        num_blocks = width if length == 1 else -(-length // block_size)
        context_len = min(max_model_len, width * block_size) if length == 1 else length
        table = list(range(first, first + num_blocks))
        first += num_blocks
        others = [
            [len(slices)] if group in state_groups else table for group in range(1, num_groups)
        ]
        # No CUDA graph replays a step whose hidden states are wanted. So the memory of a step that
        # is launched kernel by kernel is measured, also if it has few tokens.
        slices.append(
            SequenceSlice(
                [0] * length, context_len, table, True, wants_hidden=True, other_tables=others
            )
        )
    return StepBatch(slices), first
