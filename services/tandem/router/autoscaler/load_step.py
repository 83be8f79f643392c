"""Detects a step of the load: many more requests than the earlier samples predict. Pure.

    requests |              x x
             |                    n requests in the latest samples
             |  x     x           e by the rate of the samples before them
             |x   x x   x   x
             +---------------|----
               before         since the step: n >= 2 e + 10
A line over ten minutes follows a step only minutes later. Random variation is no step: with e = 4
expected requests, 18 occur once in ten million times.
"""

from collections.abc import Sequence

_TIMES = 2  # multiple of the expected requests
_MORE = 10  # additional requests, because small numbers vary randomly
_LATEST_S = 60.0  # a slower increase is not a step


def step_start(samples: Sequence[tuple[float, int]]) -> int | None:
    """Returns the index of the first (seconds, requests) sample after a step; None without one.

    The samples before the step must cover at least as much time as those after it.
    """
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
