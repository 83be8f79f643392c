"""A step's batch as tensors: made once, used by every layer.

Rows are the step's tokens, sequence after sequence in the order that attention wants, then padding
up to the multiple that the kernels ask for; padding rows are computed and never read or stored.
"""

from dataclasses import dataclass

import torch

from tandem.engine.scheduler.batch import StepBatch
from tandem_kernels.attention_groups import QuerySpan, batch_order
from tandem_kernels.kv_cache import KvPool


@dataclass(frozen=True, slots=True)
class StepInputs:
    num_tokens: int  # T; the rows beyond are padding
    token_ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    token_rows: torch.Tensor  # [T, kv heads]; see KvPool.token_rows
    spans: list[QuerySpan]
    logit_rows: torch.Tensor  # of the slices that want logits, in the batch's order


def make_step_inputs(batch: StepBatch, pool: KvPool, *, row_multiple: int) -> StepInputs:
    slices = batch.slices
    order = batch_order([s.context_len for s in slices], [s.num_tokens for s in slices])
    token_ids: list[int] = []
    positions: list[int] = []
    block_ids: list[int] = []
    spans: list[QuerySpan] = []
    last_rows = [0] * len(slices)
    for i in order:
        piece = slices[i]
        spans.append(
            QuerySpan(len(token_ids), piece.num_tokens, piece.context_len, piece.block_table)
        )
        token_ids += piece.token_ids
        places = range(piece.context_len - piece.num_tokens, piece.context_len)
        positions += places
        block_ids += [piece.block_table[place // pool.block_size] for place in places]
        last_rows[i] = len(token_ids) - 1
    num_tokens = len(token_ids)
    padding = [0] * (-num_tokens % row_multiple)
    packed = torch.tensor([token_ids + padding, positions + padding, block_ids + padding])
    packed = packed.to(pool.device)
    offsets = packed[1, :num_tokens] % pool.block_size
    return StepInputs(
        num_tokens=num_tokens,
        token_ids=packed[0],
        positions=packed[1],
        token_rows=pool.token_rows(packed[2, :num_tokens], offsets),
        spans=spans,
        logit_rows=torch.tensor(
            [
                row
                for last, s in zip(last_rows, slices, strict=True)
                for row in range(last + 1 - s.num_logits, last + 1)
            ],
            dtype=torch.long,
            device=pool.device,
        ),
    )
