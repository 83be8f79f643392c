"""Logits of which each rank has a share of the vocabulary (torch and Triton kernels).

All ranks exchange all logits only if a sampling reads them. If it reads the k largest of each row,
as with temperature 0 and with top_k, the ranks exchange their k largest.
"""

from __future__ import annotations

import torch

from tandem.engine.executor.collectives import Collectives

_LOW = (1 << 32) - 1
_POSITIVE = 0x7FFF_FFFF
_NAN = 0x7FC0_0000  # greater than infinity if its bits are compared as an integer


def whole_logits(
    ranks: Collectives, logits: torch.Tensor, vocab_size: int, top_k: int = 0
) -> torch.Tensor:
    """Returns the logits [rows, vocab_size] of all ranks. `logits` [rows, columns] has this rank's.

    If `top_k` is not 0, the others than the `top_k` largest may be -infinity on rank 0, and other
    ranks, which sample nothing, may get their own logits only. Of equal logits, those of the lower
    token ids count as larger, as in sampling.py.
    """
    share = ranks.share
    smallest = min(map(len, share.parts(vocab_size)))
    # A key has twice the bytes of a logit.
    if not 0 < top_k <= smallest or 2 * top_k * share.num_ranks > vocab_size:
        return ranks.gather(logits, vocab_size)
    keys = _keys(logits.float(), share.of(vocab_size).start)
    own = keys.amax(1, keepdim=True) if top_k == 1 else keys.topk(top_k, 1, sorted=False).values
    keys = ranks.gather(own, top_k * share.num_ranks)
    if share.rank:
        return logits
    out = torch.full((len(logits), vocab_size), float("-inf"), device=logits.device)
    return out.scatter_(1, *_tokens(keys))


def _keys(logits: torch.Tensor, first: int) -> torch.Tensor:
    """Returns an int64 key for each logit, so that a larger key is a larger logit or, of equal
    ones, a lower token id. `first` is the token id of the first column. NaN is larger than any
    number, as for argmax.

    Needs no more memory than `gather`: the largest step, which is measured, gathers all logits.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    bits.masked_fill_(logits.isnan(), _NAN)
    bits ^= (bits >> 31) & _POSITIVE  # all bits of a negative number but its sign
    token_ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    keys = bits.long()
    keys <<= 32
    keys |= _LOW - token_ids
    return keys


def _tokens(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token ids and the logits of keys."""
    ordered = (keys >> 32).int()
    bits = torch.where(ordered < 0, ordered ^ _POSITIVE, ordered)
    return _LOW - (keys & _LOW), bits.view(torch.float32)
