"""The engine's own rates and the measured transfer rate from each peer.

Step reports and pulls update the rates. The deadlines of pulls and the choice of a prefill worker
depend on the rates. The worker's record contains the rates for other processes.

Transfer rates are kept for each peer and transport. The worker's record has the rate of the
transport in use. This module does not wait and reads no clock.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from tandem.common.config.worker import WorkerConfig
from tandem.common.perf_model.meters import PairMeter
from tandem.common.perf_model.predict import queue_seconds
from tandem.common.perf_model.rates import PairRate, TierRate, WorkerRates, default_pair
from tandem.engine.types import StepReport
from tandem.worker.peers.slow_link import SlowLink

HANG_FLOOR_S = 5.0  # shortest time without a step after which an engine counts as hung
_HANG_TURNS = 4
_DEADLINE_FACTOR = 20
_DEADLINE_MIN_S = 1.0
# The remembered duration of the longest step is multiplied by this factor at each shorter step, so
# that an old long step is forgotten: 2 s becomes 0.73 s after 50 shorter steps.
_TURN_KEEP = 0.98
_RETRY_S = (0.1, 30.0)
_INTERVAL_KEEP = 0.8


class Rates:
    """The measured rates of one worker."""

    def __init__(self, config: WorkerConfig, unmeasured: WorkerRates) -> None:
        """`unmeasured` are the rates to assume before any step has been measured."""
        self.worker = unmeasured  # rates of this worker, which are also in the worker's record
        self._deadline_s_max = config.transfer.pull_deadline_s
        self._delay_s = config.transfer.delay_s
        self._slow_link = SlowLink(config.transfer.bytes_per_s)
        # (peer's worker id, transport) -> meter of the speed of pulls
        self._meters: dict[tuple[str, str], PairMeter] = {}
        self._failures: Counter[tuple[str, str]] = Counter()
        # peer's worker id -> (transport in use, reason why this transport is not the best one)
        self._in_use: dict[str, tuple[str, str]] = {}
        self._ended_at = 0.0
        self._end_interval_s = 1.0
        # duration of the longest recent step; multiplied by _TURN_KEEP at each shorter step
        self._longest_turn_s = 0.0

    def on_step(self, report: StepReport) -> None:
        """Takes the engine's rates and the duration of a step from the report of the step."""
        stats = report.stats
        tiers = tuple(TierRate(tier.name, tier.block_s) for tier in stats.tiers)
        self.worker = msgspec.structs.replace(
            report.rates or self.worker, tiers=tiers, load_queue_s=stats.load_queue_s
        )
        if report.num_prefill_tokens or report.num_decode_tokens:
            faded_s = self._longest_turn_s * _TURN_KEEP
            self._longest_turn_s = max(report.step_ms / 1000, faded_s)

    @property
    def turn_s_max(self) -> float:
        """The longest engine step to expect, in seconds; 0 if prefill was not measured yet.

        This is the larger of two times: the duration of the longest recent step, and the predicted
        duration of a step that computes as many prompt tokens as a step may compute.
        """
        if not self.worker.measured:
            return 0.0
        return max(self._longest_turn_s, queue_seconds(self.worker, self.worker.step_tokens))

    def on_end(self, now: float) -> None:
        """Records that a sequence left this worker, which frees a place in the queue."""
        if self._ended_at:
            interval_s = now - self._ended_at
            self._end_interval_s += (1 - _INTERVAL_KEEP) * (interval_s - self._end_interval_s)
        self._ended_at = now

    @property
    def retry_after_s(self) -> float:
        """Expected seconds until a place in the queue is free again."""
        shortest, longest = _RETRY_S
        return min(longest, max(shortest, self._end_interval_s))

    @property
    def pairs(self) -> dict[str, PairRate]:
        """Peer's worker id -> rate of the transport in use; a default rate if none was measured."""
        return {
            worker_id: replace(self.rate(worker_id, transport), reason=reason)
            for worker_id, (transport, reason) in self._in_use.items()
        }

    def on_pull(self, worker_id: str, transport: str, num_bytes: int, seconds: float) -> None:
        """Records a successful pull or test read."""
        key = (worker_id, transport)
        self._meters.setdefault(key, PairMeter(transport)).observe(num_bytes, seconds)
        self._failures.pop(key, None)

    def on_pull_failed(self, worker_id: str, transport: str) -> None:
        self._failures[worker_id, transport] += 1

    def failures(self, worker_id: str, transport: str) -> int:
        """Returns the number of failed pulls over this transport since the last successful one."""
        return self._failures[worker_id, transport]

    def on_probe(self, worker_id: str, transport: str, reads: Iterable[tuple[int, float]]) -> None:
        """Records test reads as (bytes, seconds). Earlier measurements of the transport are
        dropped.
        """
        reads = list(reads)
        if reads:
            self._meters.pop((worker_id, transport), None)
        for num_bytes, seconds in reads:
            slow_s = self._slow_link.seconds(num_bytes, seconds)
            self.on_pull(worker_id, transport, num_bytes, slow_s)

    def use(self, worker_id: str, transport: str, reason: str = "") -> None:
        """Sets the transport for a peer's blocks. `reason` says why no better transport is used."""
        self._in_use[worker_id] = transport, reason

    def forget(self, worker_id: str) -> None:
        self._in_use.pop(worker_id, None)
        for of_pairs in (self._meters, self._failures):
            for key in [key for key in of_pairs if key[0] == worker_id]:
                del of_pairs[key]

    def pair(self, worker_id: str, transport: str | None = None) -> PairRate | None:
        """Returns the measured rate of pulls from a peer, by default over the transport in use.

        Returns None if nothing was measured.
        """
        transport = transport or self._in_use.get(worker_id, ("", ""))[0]
        meter = self._meters.get((worker_id, transport))
        return meter.rate if meter is not None and meter.num_observations else None

    def pull_deadline_s(self, worker_id: str, num_bytes: int) -> float:
        """Returns the deadline of a pull in seconds.

        The deadline is about 1 s plus 20 times the expected duration, and at most the configured
        `pull_deadline_s`. If no rate was measured, the result is `pull_deadline_s`.
        """
        rate = self.pair(worker_id)
        if rate is None:
            return self._deadline_s_max
        wide_s = _DEADLINE_MIN_S + self._delay_s + _DEADLINE_FACTOR * rate.seconds(num_bytes)
        return min(self._deadline_s_max, wide_s)

    def rate(self, worker_id: str, transport: str) -> PairRate:
        """Returns the measured rate, or a default if nothing was measured."""
        return self.pair(worker_id, transport) or default_pair(transport)


def hang_timeout_s(turn_s_max: float, heartbeat_timeout_s: float) -> float:
    """Returns for how long a producer's step counter may stand still before the producer's engine
    counts as hung.

    The result is 4 * `turn_s_max`, but at least `HANG_FLOOR_S` and at most `heartbeat_timeout_s`.
    For example, the result is 8 s if the longest step takes 2 s. If no step was measured
    (`turn_s_max` is 0), the result is `heartbeat_timeout_s`.
    """
    if turn_s_max <= 0:
        return heartbeat_timeout_s
    return min(heartbeat_timeout_s, max(HANG_FLOOR_S, _HANG_TURNS * turn_s_max))
