"""Samples tokens from logits, greedily or at random. The random number for a token depends only on
the seed and on the position of the token.

Tokens are ranked by logit, and tokens with equal logits by token id. Filters are applied in this
order, which is vLLM's:

    min_p    keeps tokens at least min_p times as likely as the most likely one
    top_k    keeps the first k of these tokens
    top_p    keeps the fewest of these whose probabilities sum to at least top_p

A uniform random number then selects one of the kept tokens by their cumulative probability.

A row may be edited first (edits.py). The edit works on a copy, so log probabilities use the
original logits. Each row is computed separately on the host, so the result does not depend on
other rows or on the number of threads. This module uses numpy. The native kernels
(native/draws.h) draw in the same way, but round the weights differently.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tandem_kernels.edits import Edit, edited_logits, most_likely_after
from tandem_kernels.edits import Ids as EditedIds
from tandem_kernels.philox import uniform

# Stands for a token that cannot be sampled, because a logit of the row is NaN or infinity.
NO_TOKEN = -1
_HEAD_TOKENS = 256  # number of tokens that are sorted at first; more are sorted if necessary
_HEAD_GROWTH = 16

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Draw:
    """The sampling parameters of one row. With temperature 0 the most likely token is taken. top_k
    0, top_p 1 and min_p 0 disable their filters."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int  # index of the sampled token in its sequence, prompt included
    edit: Edit | None = None


DrawRows = Callable[[Sequence[Floats], Sequence[Draw]], list[int]]


def draw_rows(rows: Sequence[Floats], draws: Sequence[Draw]) -> list[int]:
    """Draws an index of each row of edited logits, by their temperatures above 0 and filters."""
    return [_draw(row, draw) for row, draw in zip(rows, draws, strict=True)]


def sample(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    most_likely: list[int] | None = None,
    draw_rows: DrawRows = draw_rows,
) -> list[int]:
    """Samples a token id for each row of fp32 logits [n, vocab] on any device. The result has
    NO_TOKEN for a row whose largest logit is NaN or infinite; a NaN counts as the largest.

    `most_likely` has the most likely token of each row, with the lowest id if several are equally
    likely. If it is None, this function finds these tokens. `draw_rows` is what draws.
    """
    on_host = logits.device.type == "cpu"
    # numpy's argmax is vectorized; torch's takes twelve times as long.
    on_device: Any = logits.numpy() if on_host else logits
    if most_likely is None:
        most_likely = on_device.argmax(-1).tolist()
    assert len(most_likely) == len(draws)
    largest = on_device[list(range(len(draws))), most_likely].tolist()
    tokens = [
        token if math.isfinite(logit) else NO_TOKEN
        for token, logit in zip(most_likely, largest, strict=True)
    ]
    sampled = [
        i
        for i, (draw, token) in enumerate(zip(draws, tokens, strict=True))
        if token != NO_TOKEN
        and (draw.temperature > 0 or (draw.edit is not None and not draw.edit.keeps(token)))
    ]
    if not sampled:
        return tokens
    rows = (logits if on_host else logits[sampled].cpu()).numpy()
    drawn: list[tuple[int, Floats, EditedIds | None]] = []
    for place, i in enumerate(sampled):
        row, draw = rows[i if on_host else place], draws[i]
        if draw.edit is None:
            drawn.append((i, row, None))
        elif draw.temperature == 0:
            tokens[i] = most_likely_after(row, draw.edit, tokens[i])
        else:
            drawn.append((i, *edited_logits(row, draw.edit)))
    found = draw_rows([row for _, row, _ in drawn], [draws[i] for i, _, _ in drawn])
    for (i, _, ids), index in zip(drawn, found, strict=True):
        tokens[i] = index if ids is None else int(ids[index])
    return tokens


def _draw(logits: Floats, draw: Draw) -> int:
    most = logits.max()
    if not np.isfinite(most):  # An edit has set all logits to -infinity, or one to infinity.
        return int(logits.argmax())
    # The most likely token has weight 1. With a tiny temperature, the exponents of other tokens
    # overflow to -infinity, which gives weight 0.
    with np.errstate(over="ignore"):
        weights = np.exp((logits - most) / np.float32(draw.temperature))
    left = weights >= np.float32(draw.min_p)
    num_left = int(np.count_nonzero(left))
    if 0 < draw.top_k < num_left:
        num_left = draw.top_k
        mass = float(weights[_rank(logits, num_left)].sum(dtype=np.float64))
    else:
        mass = float(weights[left].sum(dtype=np.float64))
    return _token_at(uniform(draw.seed, draw.position), logits, weights, num_left, mass, draw.top_p)


def _token_at(
    u: float, logits: Floats, weights: Floats, num_left: int, mass: float, top_p: float
) -> int:
    """Applies top_p to the `num_left` most likely tokens, whose total weight is `mass`. Returns the
    token that the uniform number `u` selects among the kept tokens.

    Sorting the whole vocabulary takes milliseconds, so only the first 256 tokens are sorted at
    first, and more if the selected token is not among them.
    """
    size = min(_HEAD_TOKENS, num_left)
    while True:
        ranked = _rank(logits, size)
        cumulative = np.cumsum(weights[ranked], dtype=np.float64)
        if size == num_left:
            mass = float(cumulative[-1])
        kept = mass
        if top_p < 1:
            cut = int(np.searchsorted(cumulative, top_p * mass))
            kept = float(cumulative[cut]) if cut < size else mass
        # `u` is less than 1, but the product may be rounded up to `kept`, beyond the last token.
        target = min(u * kept, float(np.nextafter(kept, 0)))
        index = int(np.searchsorted(cumulative, target, side="right"))
        if index < size and (top_p >= 1 or cut < size):
            return int(ranked[index])
        size = min(size * _HEAD_GROWTH, num_left)


def _rank(logits: Floats, count: int) -> Ids:
    """Returns the ids of the `count` most likely tokens, the most likely one first. Of equally
    likely tokens, the one with the lower id comes first."""
    if count < len(logits):
        threshold = np.partition(logits, -count)[-count]
        above = np.flatnonzero(logits > threshold)
        equal = np.flatnonzero(logits == threshold)[: count - len(above)]
        ids = np.concatenate((above, equal))
    else:
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")]
