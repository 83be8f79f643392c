"""Decides how many workers each pool should have, from observations. Does no I/O.

    signal  size that the signal requests
    load    upper bound of the load forecast one cold start ahead, divided by target utilization
    step    the size of `load`, under this name for a minute after a sudden increase of the load
    queue   enough workers to empty, in a minute, the queue that is left when new workers are ready
    ttft    a quarter more workers in the pool where requests wait, if the TTFT quantile is too high
    itl     a quarter more decode workers, if the ITL quantile is too high
    kv      enough decode workers to bring the use of their KV cache below its limit
    held    at least one decode worker, if requests wait for an empty pool
The requested size of a pool is the largest size that any signal requests, within the configured
bounds. `hysteresis.py` decides when the pool gets the requested size. If no request arrived or ran
for a while, both pools are idle, and each gets its smallest size at once.

Loads are measured in workers: a load of 1.0 keeps one worker busy. Example: 10 requests a second
that each need 0.2 s of prefill, according to the workers' measured rates, are a load of 2.0 on the
prefill pool. Without a prefill pool (its bounds are 0), decode workers carry both loads.

This module knows no clock, network or Ray. The router runs it (`router/scaling/autoscale.py`), and
so does the simulator (`simulator/autoscaled.py`).
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.perf_model.rates import DecodeRate
from tandem.router.autoscaler.demand import Demand, Observation, PoolSeen, quantile
from tandem.router.autoscaler.forecast import Forecast, forecast
from tandem.router.autoscaler.hysteresis import Stabilizer
from tandem.router.autoscaler.load_step import step_start

Role = Literal["prefill", "decode"]

OUTPUT_TOKENS_GUESS = 256  # assumed output tokens of a request until a request has ended
_RECENT_S = 60.0  # the signals `ttft` and `itl` use the latencies of the last 60 s
_COUNT_MIN = 10  # the signals `ttft` and `itl` need at least this many latencies
_DRAIN_S = 60.0  # the signal `queue` requests enough workers to empty the queue in this time
_MORE = 0.25  # fraction of a pool's workers to add if a latency exceeds its SLO limit
# The pools are idle only if no request arrived for 8 times the mean pause between requests. At a
# steady load, random arrivals have such a pause only once in 3,000 requests.
_PAUSES = 8
# For this many seconds after a sudden rise of the load, a pool may grow even if it just shrank.
_STEP_S = 60.0


class ScalingDecision(msgspec.Struct, frozen=True):
    """The decision about one pool's size. `line` explains the decision to operators."""

    role: Role
    size: int  # current number of workers
    wanted: int  # number of workers that the signals request, within the bounds
    to: int  # new number of workers
    # Name of the signal that requests the largest size, such as "load", or one of these reasons:
    # "bounds" (a signal requests a size outside the configured bounds), "start" (no load is known
    # yet), "idle" (no request arrived or ran for a while).
    why: str
    line: str


class _Wish(NamedTuple):
    workers: float
    why: str


class _Load(NamedTuple):
    at_s: float
    prefill: float  # load of the prefill pool, as a multiple of one worker's capacity
    decode: float  # load of the decode pool, as a multiple of one worker's capacity
    span_s: float
    num_requests: int


class Autoscaler:
    """Decides the sizes of the pools from observations, and keeps the history of the loads."""

    def __init__(self, config: AutoscaleConfig, now_s: float) -> None:
        self._config = config
        self._seen: deque[Observation] = deque()
        self._loads: deque[_Load] = deque()
        self._stabilizers = {role: Stabilizer(config, now_s) for role in get_args(Role)}
        # `_stepped_s` is the time when the last sudden increase of the load was detected, and
        # `_step_from_s` the earlier time when the increase began.
        self._stepped_s = self._step_from_s = -float("inf")
        self._busy_s = now_s  # last time when a request arrived, waited or ran

    def decide(self, seen: Observation) -> tuple[ScalingDecision, ScalingDecision]:
        """Decides the sizes of the prefill pool and of the decode pool."""
        self._remember(seen)
        if self._is_idle(seen):
            return self._rest("prefill", seen), self._rest("decode", seen)
        before = next(s for s in self._seen if s.now_s >= seen.now_s - _RECENT_S)
        recent = seen.demand.since(before.demand)
        prefill = self._forecast([(load.at_s, load.prefill) for load in self._loads], seen)
        decode = self._forecast([(load.at_s, load.decode) for load in self._loads], seen)
        return (
            self._decide("prefill", seen, prefill, recent, self._prefill(seen, prefill, recent)),
            self._decide("decode", seen, decode, recent, self._decode(seen, decode, recent)),
        )

    def _remember(self, seen: Observation) -> None:
        config = self._config
        if self._seen and (span_s := seen.now_s - self._seen[-1].now_s) > 0:
            came = seen.demand.since(self._seen[-1].demand)
            tokens_per_s = came.num_requests * self._output_tokens(seen) / span_s
            prefill = came.prefill_s / span_s
            decode = tokens_per_s / decode_tokens_per_s(seen.decode_rate, config.itl_s)
            if config.prefill_max == 0:
                prefill, decode = 0.0, prefill + decode
            if came.num_requests:
                self._busy_s = seen.now_s
            self._loads.append(_Load(seen.now_s, prefill, decode, span_s, came.num_requests))
            since = [load for load in self._loads if load.at_s >= self._step_from_s]
            start = step_start([(load.span_s, load.num_requests) for load in since])
            if start is not None:
                self._stepped_s = seen.now_s
                self._step_from_s = since[start].at_s
        self._seen.append(seen)
        oldest_s = seen.now_s - config.history_s
        while len(self._seen) > 1 and self._seen[0].now_s < oldest_s:
            self._seen.popleft()
        while self._loads and self._loads[0].at_s < oldest_s:
            self._loads.popleft()

    def _is_idle(self, seen: Observation) -> bool:
        """Returns whether no request arrived, waited or ran for `idle_s` seconds.

        The time without requests must also be at least 8 times the usual pause between requests.
        """
        if seen.num_held or not (seen.prefill.is_idle and seen.decode.is_idle):
            self._busy_s = seen.now_s
        first = self._seen[0]
        idle_s = self._config.idle_s
        num_requests = seen.demand.since(first.demand).num_requests
        usual_s = (self._busy_s - first.now_s) / num_requests if num_requests else 0.0
        return idle_s > 0 and seen.now_s - self._busy_s >= max(idle_s, _PAUSES * usual_s)

    def _rest(self, role: Role, seen: Observation) -> ScalingDecision:
        """Gives an idle pool its smallest size and drops its history."""
        config = self._config
        pool = seen.prefill if role == "prefill" else seen.decode
        least = config.prefill_min if role == "prefill" else config.decode_min
        self._loads.clear()
        self._stabilizers[role].rest(seen.now_s)
        idle_s = seen.now_s - self._busy_s
        line = f"{role} {pool.wanted} -> {least}: no request for {idle_s:.0f} s"
        return ScalingDecision(role, pool.wanted, least, least, "idle", line)

    def _output_tokens(self, seen: Observation) -> float:
        """Returns the mean output tokens of recent requests.

        Before any request has ended, an assumed number is returned.
        """
        came = seen.demand.since(self._seen[0].demand)
        ended = came if came.num_ended else seen.demand
        return ended.output_tokens / ended.num_ended if ended.num_ended else OUTPUT_TOKENS_GUESS

    def _forecast(self, loads: Sequence[tuple[float, float]], seen: Observation) -> Forecast:
        """Returns the maximum of two forecasts, field by field.

        One forecast uses all loads. The other forecast uses only the loads since the last sudden
        increase, because a line through all loads follows an increase only slowly.
        """
        if not loads:
            return Forecast(0.0, 0.0, 0.0)
        config = self._config
        made = [
            forecast(
                some,
                now_s=seen.now_s,
                horizon_s=config.cold_start_s + config.interval_s,
                quantile=config.load_quantile,
            )
            for some in (loads, [load for load in loads if load[0] >= self._step_from_s])
            if some
        ]
        return Forecast(*(max(each) for each in zip(*made, strict=True)))

    def _prefill(self, seen: Observation, load: Forecast, recent: Demand) -> list[_Wish]:
        config = self._config
        pool = seen.prefill
        if config.prefill_max == 0:
            return []
        wishes = [
            _Wish(load.bound / config.utilization, self._load_name(seen)),
            _Wish(load.now + self._left_s(pool, load) / _DRAIN_S, "queue"),
        ]
        if self._misses(recent.ttft) and not _waits(seen.decode):
            wishes.append(_Wish(_more(pool), "ttft"))
        return wishes

    def _decode(self, seen: Observation, load: Forecast, recent: Demand) -> list[_Wish]:
        config = self._config
        pool = seen.decode
        wishes = [
            _Wish(load.bound / config.utilization, self._load_name(seen)),
            _Wish(pool.num_ready * pool.kv_use / config.kv_use_max, "kv"),
        ]
        if config.prefill_max == 0:
            wishes.append(_Wish(load.now + self._left_s(pool, load) / _DRAIN_S, "queue"))
        if self._misses(recent.ttft) and (_waits(pool) or config.prefill_max == 0):
            wishes.append(_Wish(_more(pool), "ttft"))
        if self._misses(recent.itl):
            wishes.append(_Wish(_more(pool), "itl"))
        if seen.num_held:
            wishes.append(_Wish(max(1, pool.num_ready), "held"))
        return wishes

    def _load_name(self, seen: Observation) -> str:
        return "step" if seen.now_s - self._stepped_s <= _STEP_S else "load"

    def _left_s(self, pool: PoolSeen, load: Forecast) -> float:
        """Returns how much of the queued work remains when a new worker becomes ready.

        The unit is seconds of work of one worker: 6.0 takes three workers 2 s.
        """
        spare = max(0.0, max(pool.num_ready, pool.wanted) - load.now)
        return max(0.0, pool.queued_s - spare * self._config.cold_start_s)

    def _misses(self, counts: tuple[int, ...]) -> bool:
        enough = sum(counts) >= _COUNT_MIN
        return enough and quantile(counts, self._config.slo_quantile) > 1.0

    def _decide(
        self,
        role: Role,
        seen: Observation,
        load: Forecast,
        recent: Demand,
        wishes: list[_Wish],
    ) -> ScalingDecision:
        config = self._config
        pool = seen.prefill if role == "prefill" else seen.decode
        least = config.prefill_min if role == "prefill" else config.decode_min
        most = config.prefill_max if role == "prefill" else config.decode_max
        most_wanted = max(wishes, key=lambda wish: wish.workers, default=_Wish(0, "load"))
        wanted = math.ceil(most_wanted.workers - 1e-9)
        why = most_wanted.why
        keep = math.ceil(most_wanted.workers / config.down_margin - 1e-9)
        if not self._loads and pool.wanted:
            wanted = pool.wanted
            why = "start"  # no load was measured yet, so the pool keeps its size
        bounded = min(most, max(least, wanted))
        why = why if bounded == wanted else "bounds"
        to, held = self._stabilizers[role].step(
            seen.now_s,
            pool.wanted,
            bounded,
            min(most, max(least, keep)),
            is_urgent=most_wanted.why == "step",
        )
        horizon_s = config.cold_start_s + config.interval_s
        line = (
            f"{role} {pool.wanted} -> {to} because of {why}: {wanted} wanted, {least} to {most} "
            f"allowed{', held back: ' + held if held else ''}; load now {load.now:.2f} workers, "
            f"predicted in {horizon_s:.0f} s {load.ahead:.2f}, "
            f"p{config.load_quantile * 100:.0f} of the prediction {load.bound:.2f}, target "
            f"{config.utilization:g} per worker; ttft p{config.slo_quantile * 100:.0f} "
            f"{quantile(recent.ttft, config.slo_quantile):g} and itl "
            f"{quantile(recent.itl, config.slo_quantile):g} of their targets; {pool.num_ready} "
            f"ready, {pool.queued_s:.1f} s queued, {pool.num_waiting} waiting, KV "
            f"{pool.kv_use:.0%} full"
        )
        return ScalingDecision(role, pool.wanted, bounded, to, why, line)


def decode_tokens_per_s(rate: DecodeRate, itl_s: float) -> float:
    """Returns the most tokens per second that a decode worker can generate within the ITL limit.

    The batch has as many sequences as possible with decode steps of at most `itl_s` seconds.
    """
    sequences = max(1.0, (itl_s - rate.step_s) / max(rate.sequence_s, 1e-9))
    return sequences / (rate.step_s + rate.sequence_s * sequences)


def _more(pool: PoolSeen) -> int:
    """Returns 1.25 times the number of ready workers, rounded up: 4 become 5."""
    return pool.num_ready + max(1, math.ceil(_MORE * pool.num_ready))


def _waits(pool: PoolSeen) -> bool:
    return pool.num_waiting > pool.num_ready
