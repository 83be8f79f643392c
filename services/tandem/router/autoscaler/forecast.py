"""Forecasts the load of a pool a short time ahead, from its loads of the last minutes. No I/O.

    load |                  b         x  a measured load
         |         x       .-a        .-'  the line, fitted to the loads by least squares
         |   x  x    x .-'            a  `ahead`, the line's value at the horizon
         |  x    .-' x                b  `bound`, above `ahead`
         |   .-'  x
         +------------|------|---- time
                     now   horizon
The horizon is one cold start ahead, because a worker that is requested now begins to serve then.
About half of the measured loads lie above the line, so a pool sized for the line would be too small
half of the time. So `bound` adds a margin to the line. Example: 70% of the measured loads are at
most 0.4 above the line. If the line is at 3.0 at the horizon, the bound for 70% is 3.4.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Forecast(NamedTuple):
    now: float  # forecast of the load now, in workers: the fitted line's value
    ahead: float  # forecast of the load at the horizon, in workers
    bound: float  # `ahead` plus a margin, which covers most measured loads above the line


def forecast(
    samples: Sequence[tuple[float, float]], *, now_s: float, horizon_s: float, quantile: float
) -> Forecast:
    """Returns the forecast from at least one sample (time in seconds, load).

    With fewer than three samples, the line is horizontal at the mean load.
    """
    count = len(samples)
    mean_t = sum(t for t, _ in samples) / count
    mean = sum(load for _, load in samples) / count
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    slope = 0.0
    if count > 2 and spread > 0:
        slope = sum((t - mean_t) * (load - mean) for t, load in samples) / spread
    now = max(0.0, mean + slope * (now_s - mean_t))
    # A line through few samples may be steep by chance. So two limits apply: samples of the last
    # 30 s forecast at most 30 s ahead, and `ahead` is at most twice the largest measured load.
    if slope > 0:
        horizon_s = min(horizon_s, now_s - samples[0][0])
    ahead = min(max(0.0, now + slope * horizon_s), 2 * max(load for _, load in samples))
    above = sorted(load - (mean + slope * (t - mean_t)) for t, load in samples)
    return Forecast(now, ahead, ahead + max(0.0, above[min(count - 1, int(quantile * count))]))
