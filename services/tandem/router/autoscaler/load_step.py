"""Detects a step of the load: many more requests than the earlier samples predict. Does no I/O.

    requests |              x x
             |
             |  x     x
             |x   x x   x   x
             +-------------|------
               before       after the step
The requests of the last seconds are compared with the rate of requests before. There is a step if
n >= 2 e + 10, where n is the number of recent requests, and e is the number expected from the rate
before. Example: 4 requests in 10 s before make 4 expected in the last 10 s; 18 requests are a step.
Random arrivals give 18 only once in four million times. The forecast needs this detection, because
it fits a line to ten minutes of loads, which follows a sudden increase only after minutes.
"""

from collections.abc import Sequence

# A step has at least _TIMES * expected + _MORE requests. `_MORE` is there because small numbers of
# requests vary by chance.
_TIMES = 2
_MORE = 10
_LATEST_S = 60.0  # a step is looked for only in the last 60 s


def step_start(samples: Sequence[tuple[float, int]]) -> int | None:
    """Returns the index of the first sample after a step of the load; None if there is no step.

    A sample is (duration in seconds, number of requests). The samples before a step must cover at
    least as much time as the samples after it.
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
