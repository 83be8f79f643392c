"""Edits logits before sampling: bias, penalties and masks. The operations, in vLLM's order, are:

    operation     tokens that it edits                      new logit
    bias          tokens in the request's logit_bias        l + bias
    repetition    tokens in the prompt or the completion    l / r if l > 0 else l * r
    frequency,    tokens in the completion                  l - (frequency * count + presence)
      presence
    masks         banned tokens, and tokens without a       -inf
                  bit in `mask`

l is the logit, r the repetition penalty, and count the number of times the token is in the
completion. `mask` has one bit per token of the vocabulary and comes from a grammar.

The formulas are computed in fp32 with a rounding after each operation, so all backends give the
same bits. Except for `mask`, the time for an edit depends on the number of edited tokens and not on
the size of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Edit:
    """The edit of one row of logits. `bias`, `scales` and `penalties` have one element for each of
    `token_ids`, which are distinct."""

    token_ids: Ids
    bias: Floats
    scales: Floats  # repetition penalties; 1: no penalty
    penalties: Floats  # frequency * count + presence
    banned: Sequence[int] = ()
    # Bit i % 32 of word i // 32 is set if token i is allowed; the bits after the vocabulary are 0.
    # At least one token is allowed.
    mask: Ids | None = None

    def keeps(self, token_id: int) -> bool:
        """`token_id` is the most likely token before the edit. Returns True if it certainly is the
        most likely one after the edit too, and False if this is unknown."""
        if self.mask is None or len(self.token_ids) or self.banned:
            return False
        return bool(self.mask[token_id // 32] >> (token_id % 32) & 1)


def apply_edit(logits: Floats, edit: Edit) -> None:
    """Edits a row of logits [vocab] in place."""
    logits[edit.token_ids] = _edited(logits[edit.token_ids], edit)
    logits[list(edit.banned)] = -np.inf
    if edit.mask is not None:
        logits[_ids_of(~edit.mask, len(logits))] = -np.inf


def edited_logits(logits: Floats, edit: Edit) -> tuple[Floats, Ids | None]:
    """Returns edited logits, and the ids of the tokens to which they belong in ascending order.
    None instead of the ids means the whole vocabulary. `logits` [vocab] is not changed.

    If the mask allows less than half of the tokens, only the logits of the allowed tokens are
    returned.
    """
    if edit.mask is not None and 2 * _num_bits(edit.mask) < len(logits):
        left = _ids_of(edit.mask, len(logits))
        return _edit_few(logits, edit, left), left
    edited = logits.copy()
    apply_edit(edited, edit)
    return edited, None


def most_likely_after(logits: Floats, edit: Edit, most_likely: int) -> int:
    """Returns the most likely token of a row of logits [vocab] after an edit. `most_likely` is the
    most likely token before the edit. Of equally likely tokens, the one with the lowest id counts
    as the most likely."""
    is_edited = most_likely in edit.banned or bool((edit.token_ids == most_likely).any())
    if edit.mask is not None or is_edited:
        values, ids = edited_logits(logits, edit)
        best = int(values.argmax())
        return best if ids is None else int(ids[best])
    # Here `most_likely` itself is not edited. Only an edited token can become more likely than it.
    values = _edited(logits[edit.token_ids], edit)
    for token_id in edit.banned:
        values[edit.token_ids == token_id] = -np.inf
    most = values.max(initial=-np.inf)
    rivals = edit.token_ids[values == most].tolist()
    if most < logits[most_likely]:
        return most_likely
    first: int = min(rivals if most > logits[most_likely] else [*rivals, most_likely])
    return first


def _edited(values: Floats, edit: Edit) -> Floats:
    """Applies bias and penalties to `values`, the logits of `edit.token_ids`."""
    biased = values + edit.bias
    scaled: Floats = np.where(biased > 0, biased / edit.scales, biased * edit.scales)
    return scaled - edit.penalties


def _edit_few(logits: Floats, edit: Edit, left: Ids) -> Floats:
    """Returns the edited logits of only the tokens `left`. These ids must be in ascending order."""
    values = logits[left]
    if len(edit.token_ids):
        edited = _edited(logits[edit.token_ids], edit)
        places = np.minimum(np.searchsorted(left, edit.token_ids), len(left) - 1)
        is_left = left[places] == edit.token_ids
        values[places[is_left]] = edited[is_left]
    if edit.banned:
        values[np.isin(left, edit.banned)] = -np.inf
    return values


def _ids_of(mask: Ids, vocab: int) -> Ids:
    """Returns the ids of the tokens whose bits in the mask are set, in ascending order."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little")
    return np.flatnonzero(bits.view(np.bool_)).astype(np.int32)


def _num_bits(mask: Ids) -> int:
    return int.from_bytes(mask.tobytes()).bit_count()
