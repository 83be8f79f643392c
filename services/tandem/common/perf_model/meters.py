"""Fits the numbers in `rates.py` online to the measured durations of steps and pulls. Does no I/O.

This is weighted least squares with forgetting. An observation is weighted by its relative error, so
that short and long observations count alike. With each new observation, the weight of the older
ones is multiplied by `_KEEP`, so about the last 50 count. Four measures make the fit robust on a
shared machine:

- An outlier, such as a step that the machine's scheduler interrupted, has a smaller weight.
- `_CHANGE_AFTER` outliers in a row on the same side mean a change. Older data is then dropped.
- No coefficient is negative.
- Each fit is drawn slightly towards the previous fit, and the first fit towards the default.

The fourth measure matters if the observations cannot separate two coefficients. For example, if all
steps have 512 tokens, the observations determine only the sum step_s + 512 * token_s. The fit then
keeps the previous ratio of step_s to token_s.
"""

import math
from collections.abc import Sequence
from itertools import combinations

from tandem.common.perf_model.rates import PairRate, default_pair

_KEEP = 0.98
# Weight of the previous coefficients in a new fit, relative to the weight of all observations.
_INERTIA = 0.01
# An observation is an outlier if its error is more than `_OUTLIER` times the expected error.
_OUTLIER = 3.0
_CHANGE_AFTER = 8
# The coefficients are solved after each of the first `_SOLVED_ALWAYS` observations, and then after
# every `_SOLVED_EVERY`-th observation.
_SOLVED_ALWAYS = 64
_SOLVED_EVERY = 4
_ERROR_FIRST = 0.2
_ERROR_KEEP = 0.9
_ERROR_MIN = 0.02  # lower bound of the expected relative error, for a quiet machine
_REST_MIN = 0.01  # smallest part of the first measurement that is fitted
_LATENCY_MIN_S = 1e-5
_BYTE_MIN_S = 1e-12
# A measurement beyond these limits is implausible. The limits also keep all sums of the fit finite.
_SECONDS_MIN = 1e-9
SECONDS_MAX = 1e5
_FEATURE_MAX = 1e18


class LinearMeter:
    """Fits seconds = sum of coefficient * feature, with all coefficients at least 0."""

    def __init__(self, guess: Sequence[float]) -> None:
        self._guess = tuple(guess)
        self._size = len(self._guess)
        self.coefficients = self._guess
        self.num_observations = 0
        self._a: list[list[float]]
        self._b: list[float]
        self._start(1.0)

    def observe(self, features: Sequence[float], seconds: float, known_s: float = 0.0) -> bool:
        """Adds one measurement. Returns False if it is implausible, and then ignores it.

        `known_s` of the `seconds` have another cause, and only the rest is fitted. The error counts
        relative to all `seconds`: the rest is a difference of two long durations, so its own
        relative error says little, and the smallest differences would count most.
        """
        if not _SECONDS_MIN <= seconds <= SECONDS_MAX:
            return False
        if not all(0 <= feature <= _FEATURE_MAX for feature in features):
            return False
        rest_s = seconds - known_s
        ratio = max(rest_s, _REST_MIN * seconds) / max(_SECONDS_MIN, _dot(self._guess, features))
        if not self.num_observations:
            self._start(ratio)
        predicted_s = known_s + _dot(self.coefficients, features)
        off = math.log(seconds / max(_SECONDS_MIN, predicted_s))
        weight = self._weigh(off)
        if abs(self._outliers) >= _CHANGE_AFTER:
            self._start(ratio)
            weight = 1.0
        self._add([f / seconds for f in features], rest_s / seconds, weight)
        self.num_observations += 1
        if self.num_observations < _SOLVED_ALWAYS or self.num_observations % _SOLVED_EVERY == 0:
            self.coefficients = self._solve()
        return True

    def stretch(self, times: float) -> None:
        """Multiplies all coefficients by `times`: from now on, everything is expected to take
        `times` times as long."""
        self.coefficients = tuple(times * c for c in self.coefficients)
        self._a = [[x / times**2 for x in line] for line in self._a]
        self._b = [x / times for x in self._b]

    def _start(self, scale: float) -> None:
        """Resets the fit to the default, scaled by `scale`."""
        self._error = _ERROR_FIRST  # expected relative error of an observation
        # Number of outliers in a row: 3 if the last three observations took too long, -3 if they
        # took too little time.
        self._outliers = 0
        self._a = [[0.0] * self._size for _ in self._guess]
        self._b = [0.0] * self._size
        self.coefficients = tuple(scale * g for g in self._guess)

    def _weigh(self, off: float) -> float:
        limit = _OUTLIER * self._error
        if abs(off) <= limit:
            self._outliers = 0
            weight = 1.0
        else:
            same_side = (off > 0) == (self._outliers > 0)
            self._outliers = (self._outliers if same_side else 0) + (1 if off > 0 else -1)
            weight = limit / abs(off)
        surprise = min(abs(off), limit)
        self._error = max(_ERROR_MIN, _ERROR_KEEP * self._error + (1 - _ERROR_KEEP) * surprise)
        return weight

    def _add(self, row: list[float], target: float, weight: float) -> None:
        """Adds an observation. `row` has the features divided by the observed seconds, and `target`
        is the share of these that is fitted."""
        for i, x in enumerate(row):
            self._b[i] = _KEEP * self._b[i] + weight * x * target
            line = self._a[i]
            for j, y in enumerate(row):
                line[j] = _KEEP * line[j] + weight * x * y

    def _solve(self) -> tuple[float, ...]:
        """Returns the coefficients with the best fit. None of them is negative. Fits all of them
        first. If one would be negative, fits smaller and smaller subsets, with the others set to 0,
        until no coefficient is negative."""
        a = [line.copy() for line in self._a]
        b = self._b.copy()
        for i in range(self._size):
            extra = _INERTIA * a[i][i]
            a[i][i] += extra
            b[i] += extra * self.coefficients[i]
        best = self.coefficients
        lowest = math.inf
        for size in range(self._size, 0, -1):
            for kept in combinations([i for i in range(self._size) if a[i][i] > 0], size):
                solved = _solve_positive(a, b, kept)
                if solved is None:
                    continue
                x = [0.0] * self._size
                for i, value in zip(kept, solved, strict=True):
                    x[i] = value
                # The smallest loss that is possible with the coefficients in `kept`. A constant
                # that is the same for all subsets is left out.
                loss = -_dot(b, x)
                if loss < lowest:
                    best = tuple(x)
                    lowest = loss
            if lowest < math.inf:
                break
        return best


class PairMeter:
    """Fits the rate of pulls from one peer over one transport. The duration of a pull is
    latency_s + bytes / bytes_per_s."""

    def __init__(self, transport: str) -> None:
        guess = default_pair(transport)
        self._transport = transport
        self._fit = LinearMeter((guess.latency_s, 1 / guess.bytes_per_s))
        self._bytes_per_s_max = 0.0  # largest observed number of bytes per second of a whole pull

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and self._fit.observe((1.0, num_bytes), seconds):
            self._bytes_per_s_max = max(self._bytes_per_s_max, num_bytes / seconds)

    @property
    def num_observations(self) -> int:
        return self._fit.num_observations

    @property
    def rate(self) -> PairRate:
        """The fitted rate, with a minimum cost per pull.

        If all pulls were small, the fit may explain their durations by the latency alone. The
        bandwidth is then unknown, and the largest observed one is assumed.
        """
        latency_s, byte_s = self._fit.coefficients
        if byte_s > _BYTE_MIN_S:
            bytes_per_s = 1 / byte_s
        else:
            bytes_per_s = self._bytes_per_s_max or default_pair(self._transport).bytes_per_s
        return PairRate(
            self._transport,
            max(latency_s, _LATENCY_MIN_S),
            bytes_per_s,
            num_pulls=self.num_observations if byte_s > _BYTE_MIN_S else 0,
        )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _solve_positive(
    a: Sequence[Sequence[float]], b: Sequence[float], kept: Sequence[int]
) -> list[float] | None:
    """Solves the linear equations for the unknowns in `kept`. Returns None if one of them is
    negative."""
    # The equations are scaled so that the diagonal is 1. Otherwise precision would be lost, because
    # seconds per byte are some 10^12 times smaller than seconds per step.
    scale = [1 / math.sqrt(a[i][i]) for i in kept]
    n = len(kept)
    rows = [
        [a[i][j] * scale[p] * scale[q] for q, j in enumerate(kept)] + [b[i] * scale[p]]
        for p, i in enumerate(kept)
    ]
    for column in range(n):  # no pivoting is needed, because the matrix is positive definite
        pivot = rows[column][column]
        if pivot <= 0:
            return None
        for row in rows[column + 1 :]:
            factor = row[column] / pivot
            for k in range(column, n + 1):
                row[k] -= factor * rows[column][k]
    x = [0.0] * n
    for i in reversed(range(n)):
        known = sum(rows[i][k] * x[k] for k in range(i + 1, n))
        x[i] = (rows[i][n] - known) / rows[i][i]
        if x[i] < 0:
            return None
    return [value * s for value, s in zip(x, scale, strict=True)]
