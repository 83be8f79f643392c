"""Decides how many workers each pool should have, from observations. Pure.

    load   the bound of the forecast a cold start ahead, over what a worker carries
    queue  what will still wait when a new worker comes, to be gone a minute later
    ttft   the quantile of first tokens is over the limit: a quarter more, where it waits
    itl    the quantile of next tokens is: a quarter more decode workers
    kv     the decode workers' memory
    held   an empty pool that somebody waits for

A pool wants the largest of these, within its bounds; `hysteresis.py` says when it gets that.
Prefill is counted in seconds of one worker for each second, decode in tokens a second, and what
carries them are the workers' own measured rates: the two pools differ in size as their work does.
Where there is no prefill pool (its bounds are 0) decode workers carry both.

Knows no clock, no network and no Ray: the router runs it (`router/scaling/autoscale.py`), and the
simulator (`simulator/autoscaled.py`).
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from tandem.autoscaler.demand import Demand, Observation, PoolSeen, quantile
from tandem.autoscaler.forecast import Forecast, forecast
from tandem.autoscaler.hysteresis import Stabilizer
from tandem.config.autoscale import AutoscaleConfig
from tandem.perf_model.rates import DecodeRate

Role = Literal["prefill", "decode"]

OUTPUT_TOKENS_GUESS = 256  # of a request, before one has ended
_RECENT_S = 60.0  # of times: a breach that is older was answered
_COUNT_MIN = 10  # of times: a quantile of fewer is one request's luck
_DRAIN_S = 60.0  # in which a queue is to be gone once new workers are there
_MORE = 0.25  # of the pool, when the SLO is missed


class Decision(msgspec.Struct, frozen=True):
    """The decision for one pool. `line` explains it to people."""

    role: Role
    size: int  # that it has
    wanted: int  # by the signals alone
    to: int  # what it is to be made
    why: str  # the signal that counted most
    line: str


class _Wish(NamedTuple):
    workers: float
    why: str


class _Load(NamedTuple):
    at_s: float
    prefill: float  # seconds of one worker for each second
    decode: float  # what one worker carries is 1


class Autoscaler:
    """Takes observations in order and keeps the history that it needs of them."""

    def __init__(self, config: AutoscaleConfig, now_s: float) -> None:
        self._config = config
        self._seen: deque[Observation] = deque()
        self._loads: deque[_Load] = deque()
        self._stabilizers = {role: Stabilizer(config, now_s) for role in get_args(Role)}

    def decide(self, seen: Observation) -> tuple[Decision, Decision]:
        """Decides the sizes of the prefill pool and of the decode pool."""
        self._remember(seen)
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
            self._loads.append(_Load(seen.now_s, prefill, decode))
        self._seen.append(seen)
        oldest_s = seen.now_s - config.history_s
        while len(self._seen) > 1 and self._seen[0].now_s < oldest_s:
            self._seen.popleft()
        while self._loads and self._loads[0].at_s < oldest_s:
            self._loads.popleft()

    def _output_tokens(self, seen: Observation) -> float:
        """Mean output tokens of recent requests; a guess before one has ended."""
        came = seen.demand.since(self._seen[0].demand)
        ended = came if came.num_ended else seen.demand
        return ended.output_tokens / ended.num_ended if ended.num_ended else OUTPUT_TOKENS_GUESS

    def _forecast(self, loads: Sequence[tuple[float, float]], seen: Observation) -> Forecast:
        if not loads:
            return Forecast(0.0, 0.0, 0.0)
        config = self._config
        horizon_s = config.cold_start_s + config.interval_s
        return forecast(loads, now_s=seen.now_s, horizon_s=horizon_s, quantile=config.load_quantile)

    def _prefill(self, seen: Observation, load: Forecast, recent: Demand) -> list[_Wish]:
        config, pool = self._config, seen.prefill
        if config.prefill_max == 0:
            return []
        wishes = [
            _Wish(load.bound / config.utilization, "load"),
            _Wish(load.now + self._left_s(pool, load) / _DRAIN_S, "queue"),
        ]
        if self._misses(recent.ttft) and not _waits(seen.decode):
            wishes.append(_Wish(_more(pool), "ttft"))
        return wishes

    def _decode(self, seen: Observation, load: Forecast, recent: Demand) -> list[_Wish]:
        config, pool = self._config, seen.decode
        wishes = [
            _Wish(load.bound / config.utilization, "load"),
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

    def _left_s(self, pool: PoolSeen, load: Forecast) -> float:
        """Seconds of one worker's work, queued now, that still wait when a new worker comes."""
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
    ) -> Decision:
        config, pool = self._config, seen.prefill if role == "prefill" else seen.decode
        least = config.prefill_min if role == "prefill" else config.decode_min
        most = config.prefill_max if role == "prefill" else config.decode_max
        most_wanted = max(wishes, key=lambda wish: wish.workers, default=_Wish(0, "load"))
        wanted, why = math.ceil(most_wanted.workers - 1e-9), most_wanted.why
        keep = math.ceil(most_wanted.workers / config.down_margin - 1e-9)
        if not self._loads and pool.wanted:
            wanted, why = pool.wanted, "start"  # nothing was seen yet
        bounded = min(most, max(least, wanted))
        why = why if bounded == wanted else "bounds"
        to, held = self._stabilizers[role].step(
            seen.now_s, pool.wanted, bounded, min(most, max(least, keep))
        )
        horizon_s = config.cold_start_s + config.interval_s
        line = (
            f"{role} {pool.wanted} -> {to} for its {why}: wanted {wanted} of {least}..{most}"
            f"{', held: ' + held if held else ''}; load {load.now:.2f}, in {horizon_s:.0f} s "
            f"{load.ahead:.2f}, p{config.load_quantile * 100:.0f} {load.bound:.2f} of "
            f"{config.utilization:g} a worker; ttft p{config.slo_quantile * 100:.0f} "
            f"{quantile(recent.ttft, config.slo_quantile):g} and itl "
            f"{quantile(recent.itl, config.slo_quantile):g} of the limit; {pool.num_ready} ready, "
            f"{pool.queued_s:.1f} s queued, {pool.num_waiting} wait, kv {pool.kv_use:.0%}"
        )
        return Decision(role, pool.wanted, bounded, to, why, line)


def decode_tokens_per_s(rate: DecodeRate, itl_s: float) -> float:
    """Tokens per second of a worker whose batch is as large as the limit between tokens allows."""
    sequences = max(1.0, (itl_s - rate.step_s) / max(rate.sequence_s, 1e-9))
    return sequences / (rate.step_s + rate.sequence_s * sequences)


def _more(pool: PoolSeen) -> int:
    """Returns a quarter more, at least one, than the ready workers; others are on their way."""
    return pool.num_ready + max(1, math.ceil(_MORE * pool.num_ready))


def _waits(pool: PoolSeen) -> bool:
    return pool.num_waiting > pool.num_ready
