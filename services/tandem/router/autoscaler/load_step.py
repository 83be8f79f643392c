"""Detects a step of the load: many more requests than the earlier samples predict. Does no I/O.

    requests |              x x
             |
             |  x     x
             |x   x x   x   x
             +-------------|------
               before       after the step
There is a step if n >= 2 e + 10, where n is the number of requests after the step, and e is the
number that the rate before the step predicts for the same time. Example: if 4 requests are
expected, 18 are a step. Random arrivals give 18 only once in four million times. The forecast needs
this detection, because its line over ten minutes follows a step only minutes later.
"""

from collections.abc import Sequence

_TIMES = 2  # a step has at least this multiple of the expected requests, plus `_MORE`
_MORE = 10  # additional requests of a step, because small numbers of requests vary by chance
_LATEST_S = 60.0  # an increase that takes longer than this is not a step


def step_start(samples: Sequence[tuple[float, int]]) -> int | None:
    """Returns the index of the first (seconds, requests) sample after a step; None without a step.

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
