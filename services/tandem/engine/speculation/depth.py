"""Chooses how many proposed tokens a step verifies."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.perf_model.step_time import DraftPrice


def num_worthwhile(gains: Sequence[float], *, num_sequences: int, price: DraftPrice) -> int:
    """Returns how many proposed tokens to add to a step of `num_sequences` decoding sequences, so
    that the step is expected to yield the most tokens per second.

    `gains` has the probability that each proposed token is accepted, in descending order. The step
    takes `price.step_s` seconds without proposed tokens. With n of them, it takes `price.fixed_s` +
    n * `price.token_s` more seconds, which must not exceed `price.most_s`.
    """
    best, best_speed = 0, num_sequences / price.step_s
    expected = float(num_sequences)
    for num, gain in enumerate(gains, 1):
        expected += gain
        added_s = price.fixed_s + num * price.token_s
        if added_s > price.most_s:
            break
        speed = expected / (price.step_s + added_s)
        if speed > best_speed:
            best, best_speed = num, speed
    return best
