"""Forecasts a load a short time ahead, from the loads of the last minutes. Pure.

    load |         x   .-'  <- bound: the line and the quantile of the loads above it
         |   x  x .-'x
         |  x .-' x
         |  .-' x              the line: least squares
         +--------------|----
            seen       now + horizon
The bound uses a quantile instead of the mean, because a pool must carry more than the load of an
average minute. The line is fitted over minutes and evaluated one cold start ahead, when a worker
that is requested now begins to serve.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Forecast(NamedTuple):
    now: float  # value of the line now
    ahead: float  # value of the line at the horizon, at least 0
    bound: float  # `ahead` plus the quantile of the loads above the line


def forecast(
    samples: Sequence[tuple[float, float]], *, now_s: float, horizon_s: float, quantile: float
) -> Forecast:
    """Forecasts from (time, load) samples, at least one. Fewer than three give no slope."""
    count = len(samples)
    mean_t = sum(t for t, _ in samples) / count
    mean = sum(load for _, load in samples) / count
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    slope = 0.0
    if count > 2 and spread > 0:
        slope = sum((t - mean_t) * (load - mean) for t, load in samples) / spread
    now = max(0.0, mean + slope * (now_s - mean_t))
    # A line over few minutes may be steep by chance. It rises at most as long as the samples cover,
    # and at most to twice the largest sample.
    if slope > 0:
        horizon_s = min(horizon_s, now_s - samples[0][0])
    ahead = min(max(0.0, now + slope * horizon_s), 2 * max(load for _, load in samples))
    above = sorted(load - (mean + slope * (t - mean_t)) for t, load in samples)
    return Forecast(now, ahead, ahead + max(0.0, above[min(count - 1, int(quantile * count))]))
