"""The inputs of a step as tensors, created once per step and used by every layer.

Each row is one token of the step. The tokens of a sequence are in consecutive rows, and the order
of the sequences is the one that attention requires. Some kernels require a multiple of 16 rows, so
padding rows may follow. Results of padding rows are not used.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.engine.scheduler.batch import StepBatch
from tandem_kernels.attention_groups import QuerySpan, batch_order
from tandem_kernels.block_sums import BlockShares
from tandem_kernels.linear_attention import StateSpan
from tandem_kernels.state_pool import Pool, StatePool


@dataclass(frozen=True, slots=True)
class StepInputs:
    num_tokens: int  # T: number of rows without the padding rows
    token_ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    # Where each token's KV is stored: one result of `KvPool.token_rows`, [T, kv heads], or
    # `RowPool.token_rows`, [T], for each KV group with blocks. These groups come before state
    # groups.
    token_rows: list[torch.Tensor]
    # For each group with blocks, one span for each sequence.
    spans: list[list[QuerySpan]]
    # For each KV group, one span for each sequence. Empty for groups with blocks.
    state_spans: list[list[StateSpan]]
    # For each row of logits, the token's row from which the logits are computed. The rows of logits
    # are in the order of the batch's slices.
    logit_rows: torch.Tensor
    top_k: int  # see StepBatch
    adapted: Mapping[str, torch.Tensor]  # digest of an adapter -> the rows that use the adapter
    # Embeddings in place of those of tokens: the first row, and fp32 [tokens, hidden] on the host.
    given: list[tuple[int, torch.Tensor]]
    # One item for each sequence whose softmax weights are summed for each KV block.
    shares: list[BlockShares]


def make_step_inputs(batch: StepBatch, pools: Sequence[Pool], *, row_multiple: int) -> StepInputs:
    """Creates the inputs of a step. `pools` has one pool for each KV group. State groups come
    last, and their tables have the slot of the running state."""
    slices = batch.slices
    block_pools = [pool for pool in pools if not isinstance(pool, StatePool)]
    block_size = block_pools[0].block_size
    device = block_pools[0].memory.device
    order = batch_order([s.context_len for s in slices], [s.num_tokens for s in slices])
    token_ids: list[int] = []
    positions: list[int] = []
    offsets: list[int] = []  # each token's index in its block
    block_ids: list[list[int]] = [[] for _ in block_pools]
    spans: list[list[QuerySpan]] = [[] for _ in block_pools]
    state_spans: list[list[StateSpan]] = [[] for _ in pools]
    last_rows = [0] * len(slices)
    adapted: dict[str, list[int]] = defaultdict(list)
    shares: list[BlockShares] = []
    given: list[tuple[int, torch.Tensor]] = []
    for i in order:
        piece = slices[i]
        of_piece = None
        if piece.block_sums is not None:
            of_piece = BlockShares(piece.block_sums, piece.num_tokens, block_size, device)
            shares.append(of_piece)
        if piece.adapter:
            adapted[piece.adapter] += range(len(token_ids), len(token_ids) + piece.num_tokens)
        given += [(len(token_ids) + first, rows) for first, rows in piece.given]
        places = range(piece.context_len - piece.num_tokens, piece.context_len)
        for group, table in enumerate(piece.block_tables):
            if group >= len(block_pools):
                state_spans[group].append(
                    StateSpan(len(token_ids), piece.num_tokens, places.start, table[0])
                )
                continue
            spans[group].append(
                QuerySpan(
                    len(token_ids),
                    piece.num_tokens,
                    piece.context_len,
                    table,
                    piece.visible,
                    of_piece,
                )
            )
            block_ids[group] += [table[place // block_size] for place in places]
        token_ids += piece.token_ids
        positions += [place + piece.num_evicted for place in places]
        offsets += [place % block_size for place in places]
        last_rows[i] = len(token_ids) - 1
    num_tokens = len(token_ids)
    padding = [0] * (-num_tokens % row_multiple)
    parts = [token_ids, positions, offsets, *block_ids]
    packed = torch.tensor([part + padding for part in parts]).to(device)
    return StepInputs(
        num_tokens=num_tokens,
        token_ids=packed[0],
        positions=packed[1],
        token_rows=[
            pool.token_rows(ids, packed[2, :num_tokens])
            for pool, ids in zip(block_pools, packed[3:, :num_tokens], strict=True)
        ],
        spans=spans,
        state_spans=state_spans,
        logit_rows=torch.tensor(
            [
                row
                for last, s in zip(last_rows, slices, strict=True)
                for row in range(last + 1 - s.num_logits, last + 1)
            ],
            dtype=torch.long,
            device=device,
        ),
        top_k=batch.top_k,
        adapted={digest: torch.tensor(rows, device=device) for digest, rows in adapted.items()},
        given=given,
        shares=shares,
    )
