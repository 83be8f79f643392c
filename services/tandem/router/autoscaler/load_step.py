"""Finds a step of the load: many more requests than the samples before it foretell. Pure.

    requests |              x x
             |                    n requests in the latest samples
             |  x     x           e by the rate of the samples before them
             |x   x x   x   x
             +---------------|----
               before         since the step: n >= 2 e + 10

A line over ten minutes follows a step minutes late. Chance makes no step: with e = 4 expected
requests, 18 come once in ten million times.
"""

from collections.abc import Sequence

_TIMES = 2  # what was expected
_MORE = 10  # requests: few are chance
_LATEST_S = 60.0  # a step that took longer to show is no step


def step_start(samples: Sequence[tuple[float, int]]) -> int | None:
    """Returns the index of the first of the (seconds, requests) samples that came after a step, or
    None without one. The time before must be as long as the time since."""
    all_s = sum(seconds for seconds, _ in samples)
    all_requests = sum(requests for _, requests in samples)
    span_s = 0.0
    requests = 0
    for start in range(len(samples) - 1, 0, -1):
        span_s += samples[start][0]
        requests += samples[start][1]
        before_s = all_s - span_s
        if span_s > min(before_s, _LATEST_S):
            return None
        expected = (all_requests - requests) / before_s * span_s
        if requests >= _TIMES * expected + _MORE:
            return start
    return None
