"""Applies the logit edits of tandem_kernels/edits.py on the device, with one program per row.

All edits of n rows, with t tokens in total, are in one int32 array `numbers`, so that a single copy
moves them to the device. The array has seven parts in this order. Floats are stored by their bits:

    part          size    content
    starts        n       index of each row's first edited token in the parts below
    edited ends   n       end of the row's edited tokens, where its banned tokens begin
    banned ends   n       end of the row's banned tokens
    token ids     t       row after row
    bias          t
    scales        t       repetition penalties
    penalties     t       sums of frequency and presence penalties

A second copy moves the masks, int32 [rows with a mask, 1 + words]. Each entry has the index of the
row in `logits`, then the row's mask.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from tandem_kernels.edits import Edit

_TILE = 256
_MASK_TILE = 4096


def edited(logits: torch.Tensor, edits: Sequence[Edit | None]) -> torch.Tensor:
    """Returns a copy of fp32 logits [n, vocab] with the edits applied. If no row has an edit,
    returns `logits` itself."""
    if not any(edits):
        return logits
    numbers, num_tokens = _packed(edits)
    if logits.is_cuda:
        numbers = numbers.pin_memory().to(logits.device, non_blocking=True)
    copied = logits.clone()
    _edit[(len(edits),)](
        copied,
        numbers,
        copied.stride(0),
        len(edits),
        num_tokens,
        TILE=_TILE,
        enable_fp_fusion=False,  # no fused multiply-add, so that results equal those on the host
    )
    masks = [(row, edit.mask) for row, edit in enumerate(edits) if edit and edit.mask is not None]
    if masks:
        words = torch.from_numpy(np.stack([np.append(np.int32(row), mask) for row, mask in masks]))
        if logits.is_cuda:
            words = words.pin_memory().to(logits.device, non_blocking=True)
        vocab = logits.shape[1]
        grid = (len(masks), triton.cdiv(vocab, _MASK_TILE))
        _mask[grid](copied, words, copied.stride(0), words.stride(0), vocab, TILE=_MASK_TILE)
    return copied


def _packed(edits: Sequence[Edit | None]) -> tuple[torch.Tensor, int]:
    bounds, ids, floats = [], [], []
    num_tokens = 0
    for edit in edits:
        if edit is None:
            bounds.append((num_tokens, num_tokens, num_tokens))
            continue
        banned = np.array(edit.banned, np.int32)
        none = np.zeros(len(banned), np.float32)
        num_edited = len(edit.token_ids)
        bounds.append((num_tokens, num_tokens + num_edited, num_tokens + num_edited + len(banned)))
        num_tokens = bounds[-1][2]
        ids += [edit.token_ids, banned]
        columns = (edit.bias, edit.scales, edit.penalties)
        floats.append(np.stack([np.concatenate((column, none)) for column in columns]))
    words = np.concatenate(floats, 1).view(np.int32)
    numbers = np.concatenate((np.array(bounds, np.int32).T.ravel(), *ids, words.ravel()))
    return torch.from_numpy(numbers), num_tokens


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _edit(logits, numbers, stride_row, num_rows, num_tokens, TILE: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride_row
    start = tl.load(numbers + row)
    end = tl.load(numbers + num_rows + row)
    banned_end = tl.load(numbers + 2 * num_rows + row)
    ids_of = numbers + 3 * num_rows
    for at in range(start, end, TILE):
        places = at + tl.arange(0, TILE)
        mask = places < end
        ids = tl.load(ids_of + places, mask=mask, other=0)
        bias = tl.load(ids_of + num_tokens + places, mask=mask, other=0)
        scales = tl.load(ids_of + 2 * num_tokens + places, mask=mask, other=0)
        penalties = tl.load(ids_of + 3 * num_tokens + places, mask=mask, other=0)
        scale = scales.to(tl.float32, bitcast=True)
        scale = tl.where(mask, scale, 1.0)
        values = tl.load(logits + ids, mask=mask, other=0.0) + bias.to(tl.float32, bitcast=True)
        values = tl.where(values > 0, tl.div_rn(values, scale), values * scale)
        tl.store(logits + ids, values - penalties.to(tl.float32, bitcast=True), mask=mask)
    tl.debug_barrier()  # waits, because another thread may have edited a token that is also banned
    for at in range(end, banned_end, TILE):
        places = at + tl.arange(0, TILE)
        mask = places < banned_end
        ids = tl.load(ids_of + places, mask=mask, other=0)
        tl.store(logits + ids, float("-inf"), mask=mask)


@triton.jit
def _mask(logits, words, stride_row, stride_words, vocab, TILE: tl.constexpr):
    words += tl.program_id(0).to(tl.int64) * stride_words
    logits += tl.load(words).to(tl.int64) * stride_row
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = ids < vocab
    packed = tl.load(words + 1 + ids // 32, mask=mask, other=-1)
    is_masked = (packed >> (ids % 32)) & 1 == 0
    tl.store(logits + ids, float("-inf"), mask=mask & is_masked)
