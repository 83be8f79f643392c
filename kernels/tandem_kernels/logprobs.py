"""Log probabilities of tokens, and of the most likely ones, from the model's own logits.

    logprob = logit - log(sum of exp(logits))
    rank    = 1 + tokens with a greater logit

The most likely tokens are ranked by logit, ties by token id. `logprobs` is the reference, on torch;
the native and the Triton kernels compute the same in one pass over the logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_ID_BITS = 32


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log probabilities of n tokens, one of each row, and of the k most likely ones."""

    logprobs: npt.NDArray[np.float32]  # [n]
    ranks: npt.NDArray[np.int32]  # [n], from 1
    top_ids: npt.NDArray[np.int32]  # [n, k], the most likely first
    top_logprobs: npt.NDArray[np.float32]  # [n, k]


def logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: int
) -> Logprobs:
    """Measures `token_ids`, one of each of `rows` of fp32 logits [any, vocab] on any device."""
    chosen_rows = logits[torch.tensor(rows, device=logits.device)]
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = chosen_rows.gather(1, ids)
    normalizer = chosen_rows.logsumexp(-1, keepdim=True)
    ranks = (chosen_rows > chosen).sum(-1) + 1
    top = pack(chosen_rows).topk(min(num_top, logits.shape[1]), dim=-1).values
    top_logits, top_ids = unpack(top)
    return Logprobs(
        (chosen - normalizer)[:, 0].cpu().numpy(),
        ranks.int().cpu().numpy(),
        top_ids.cpu().numpy(),
        (top_logits - normalizer).cpu().numpy(),
    )


def pack(logits: torch.Tensor) -> torch.Tensor:
    """Returns int64 numbers [n, vocab], ordered by logit and, of equals, by falling token id."""
    bits = (logits + 0.0).view(torch.int32)  # both zeros are one
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (keys.long() << _ID_BITS) + ((1 << _ID_BITS) - 1 - ids)


def unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits and the int32 token ids of numbers that `pack` made."""
    keys = (packed >> _ID_BITS).int()
    bits = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    ids = ((1 << _ID_BITS) - 1 - (packed & ((1 << _ID_BITS) - 1))).int()
    return bits.view(torch.float32), ids
