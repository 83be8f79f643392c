"""Log probabilities of chosen tokens and of the most likely tokens, from unedited logits.

    logprob = logit - log(sum of exp(logits))
    rank    = 1 + number of tokens with a greater logit

The most likely tokens are ordered by logit, and tokens with equal logits by token id. `logprobs` is
the reference in torch. The native and Triton kernels compute the same results in one pass over the
logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_ID_BITS = 32


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log probabilities from n rows of logits: of one chosen token per row, and of the k
    most likely tokens of each row."""

    logprobs: npt.NDArray[np.float32]  # [n]: log probability of each chosen token
    ranks: npt.NDArray[np.int32]  # [n]: rank of each chosen token; 1: no token is more likely
    top_ids: npt.NDArray[np.int32]  # [n, k], the most likely first
    top_logprobs: npt.NDArray[np.float32]  # [n, k]


def logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: int
) -> Logprobs:
    """Computes, for each of `rows` of fp32 logits [any, vocab], the log probabilities of one chosen
    token and of the `num_top` most likely tokens. `token_ids` has the chosen token of each row. The
    result is on the host."""
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
    """Packs each logit and its token id into an int64 key, [n, vocab]. Sorting the keys in
    descending order sorts tokens by logit, and tokens with equal logits by ascending id."""
    bits = (logits + 0.0).view(torch.int32)  # Adding 0.0 turns -0.0 into 0.0.
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (keys.long() << _ID_BITS) + ((1 << _ID_BITS) - 1 - ids)


def unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits and the int32 token ids from keys made by `pack`."""
    keys = (packed >> _ID_BITS).int()
    bits = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    ids = ((1 << _ID_BITS) - 1 - (packed & ((1 << _ID_BITS) - 1))).int()
    return bits.view(torch.float32), ids
