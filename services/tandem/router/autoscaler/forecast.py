"""Forecasts the load of a pool a short time ahead, from its loads of the last minutes. No I/O.

    load |                  b         x  a measured load
         |         x       .-a        .-'  the line, fitted to the loads by least squares
         |   x  x    x .-'            a  `ahead`, the line's value at the horizon
         |  x    .-' x                b  `bound`, above `ahead`
         |   .-'  x
         +------------|------|---- time
                     now   horizon
The horizon is one cold start ahead, because a worker that is requested now begins to serve then.
A pool sized for the line would be too small half of the time. So `bound` adds a quantile of the
differences between the measured loads and the line. Example: if the line's value at the horizon is
3.0, and 70% of the loads are at most 0.4 above the line, the 0.7 quantile gives a bound of 3.4.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Forecast(NamedTuple):
    now: float  # value of the line now
    ahead: float  # value of the line at the horizon, at least 0
    bound: float  # `ahead` plus a quantile of the differences between the loads and the line


def forecast(
    samples: Sequence[tuple[float, float]], *, now_s: float, horizon_s: float, quantile: float
) -> Forecast:
    """Returns the forecast from at least one (time, load) sample.

    Fewer than three samples give a horizontal line.
    """
    count = len(samples)
    mean_t = sum(t for t, _ in samples) / count
    mean = sum(load for _, load in samples) / count
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    slope = 0.0
    if count > 2 and spread > 0:
        slope = sum((t - mean_t) * (load - mean) for t, load in samples) / spread
    now = max(0.0, mean + slope * (now_s - mean_t))
    # A line through few samples may be steep by chance. So the horizon is at most as far ahead as
    # the samples reach back, and the forecast is at most twice the largest sample.
    if slope > 0:
        horizon_s = min(horizon_s, now_s - samples[0][0])
    ahead = min(max(0.0, now + slope * horizon_s), 2 * max(load for _, load in samples))
    above = sorted(load - (mean + slope * (t - mean_t)) for t, load in samples)
    return Forecast(now, ahead, ahead + max(0.0, above[min(count - 1, int(quantile * count))]))
