"""Computes the log probabilities of tandem_kernels/logprobs.py on the device.

A program reads one tile of a row and writes four results: the largest logit m, the sum of
exp(logit - m), the number of logits above the chosen token's logit, and the most likely tokens of
the tile. torch then combines the few results of all tiles.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from tandem_kernels.logprobs import Logprobs, unpack
from tandem_kernels.triton.tuning import next_power_of_2

NUM_WARPS = 8
_TILE = 4096


def logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: int
) -> Logprobs:
    """Computes the same as `tandem_kernels.logprobs.logprobs`. Rows of the logits may be
    strided."""
    vocab = logits.shape[1]
    num_rows, num_top = len(rows), min(num_top, vocab)
    tile = min(_TILE, max(16, next_power_of_2(vocab)))
    num_tiles = triton.cdiv(vocab, tile)
    device = logits.device
    wanted = torch.from_numpy(np.array((rows, token_ids), np.int32))
    if logits.is_cuda:
        wanted = wanted.pin_memory().to(device, non_blocking=True)
    largest, sums = torch.empty(2, num_rows, num_tiles, device=device)
    above = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    top = torch.empty(num_rows, num_tiles, num_top, dtype=torch.int64, device=device)
    chosen = torch.empty(num_rows, device=device)
    _measure[(num_rows, num_tiles)](
        logits,
        wanted,
        largest,
        sums,
        above,
        top,
        chosen,
        vocab,
        logits.stride(0),
        num_rows,
        num_tiles,
        num_top,
        TILE=tile,
        num_warps=NUM_WARPS,
    )
    most = largest.max(-1, keepdim=True).values
    total = (sums.double() * (largest - most).double().exp()).sum(-1, keepdim=True)
    normalizer = most.double() + total.log()
    top_logits, top_ids = unpack(top.view(num_rows, -1).topk(num_top, dim=-1).values)
    measured = torch.cat((chosen[:, None], top_logits), 1) - normalizer
    integers = torch.cat((above.sum(-1, keepdim=True, dtype=torch.int32) + 1, top_ids), 1)
    on_host, ranks_and_ids = measured.float().cpu().numpy(), integers.cpu().numpy()
    return Logprobs(on_host[:, 0], ranks_and_ids[:, 0], ranks_and_ids[:, 1:], on_host[:, 1:])


@triton.jit(do_not_specialize=["num_rows", "num_top"])
def _measure(
    logits,
    wanted,
    largest,
    sums,
    above,
    top,
    chosen,
    vocab,
    stride_row,
    num_rows,
    num_tiles,
    num_top,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    tile = tl.program_id(1)
    logits += tl.load(wanted + index).to(tl.int64) * stride_row
    own = tl.load(logits + tl.load(wanted + num_rows + index))
    ids = tile * TILE + tl.arange(0, TILE)
    is_token = ids < vocab
    values = tl.load(logits + ids, mask=is_token, other=float("-inf"))
    most = tl.max(values, 0)
    place = index * num_tiles + tile
    tl.store(largest + place, most)
    # If all logits of a tile are -inf, subtracting 0 avoids NaN.
    exponentials = tl.exp(values - tl.where(most == float("-inf"), 0.0, most))
    tl.store(sums + place, tl.sum(exponentials, 0))
    tl.store(above + place, tl.sum((values > own).to(tl.int32), 0))
    if tile == 0:
        tl.store(chosen + index, own)
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    ranked = (keys << 32) + (0xFFFFFFFF - ids.to(tl.int64))  # as in logprobs.pack
    none = tl.full((TILE,), -(1 << 63), tl.int64)
    ranked = tl.where(is_token, ranked, none)
    for nth in range(num_top):
        found = tl.max(ranked, 0)
        tl.store(top + place.to(tl.int64) * num_top + nth, found)
        ranked = tl.where(ranked == found, none, ranked)
