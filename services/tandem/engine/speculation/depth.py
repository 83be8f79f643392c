"""Chooses how many proposed tokens a step verifies."""

from __future__ import annotations

from collections.abc import Sequence


def num_worthwhile(
    gains: Sequence[float], *, num_sequences: int, step_s: float, fixed_s: float, token_s: float
) -> int:
    """Returns how many proposed tokens to add to a step of `num_sequences` decoding sequences, so
    that the step is expected to yield the most tokens per second.

    `gains` has the probability that each proposed token is accepted, in descending order. The step
    takes `step_s` seconds without proposed tokens. With n of them, it takes `fixed_s` + n *
    `token_s` more seconds.
    """
    best, best_speed = 0, num_sequences / step_s
    expected = float(num_sequences)
    for num, gain in enumerate(gains, 1):
        expected += gain
        speed = expected / (step_s + fixed_s + num * token_s)
        if speed > best_speed:
            best, best_speed = num, speed
    return best
