"""Edits logits between the model and the draw. An edit changes these tokens, in this order:

    bias         tokens of the request's own        l + bias
    repetition   of the prompt or the completion    l / r if l > 0 else l * r
    frequency    of the completion, `count` times   l - (frequency * count + presence)
    and presence
    masks        banned tokens, and all those       -inf, whatever was added
                 without a bit in `mask`

The order is vLLM's. The formula is computed in fp32 with a rounding after each operation, so that
every backend has the same bits. An edit is sparse, but for `mask`: its cost follows from the tokens
that it names, not from the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Edit:
    """The edit of one row of logits. `token_ids` are distinct; the arrays have its length."""

    token_ids: Ids
    bias: Floats
    scales: Floats  # the repetition penalty; 1: none
    penalties: Floats  # of frequency and presence together
    banned: Sequence[int] = ()
    # Packed: bit i % 32 of word i // 32 is set if token i may come; the bits after the vocabulary
    # are 0. At least one token may come.
    mask: Ids | None = None

    def keeps(self, token_id: int) -> bool:
        """Returns whether a row's most likely token is so after the edit, for certain."""
        if self.mask is None or len(self.token_ids) or self.banned:
            return False
        return bool(self.mask[token_id // 32] >> (token_id % 32) & 1)


def apply_edit(logits: Floats, edit: Edit) -> None:
    """Edits a row of logits [vocab] in place."""
    values = logits[edit.token_ids] + edit.bias
    values = np.where(values > 0, values / edit.scales, values * edit.scales)
    logits[edit.token_ids] = values - edit.penalties
    logits[list(edit.banned)] = -np.inf
    if edit.mask is not None:
        allowed = np.unpackbits(edit.mask.view(np.uint8), count=len(logits), bitorder="little")
        np.putmask(logits, allowed == 0, -np.inf)
